"""BERT's masked language model (Devlin et al. 2019), without next-sentence prediction, as RoBERTa trains it.

Shapes: B samples, L tokens, D width, H heads, V words of the vocabulary, P predicted positions per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.errors import RequestError
from trainer.contract.task_files import require_tokenizers
from trainer.contract.task_options import MaskedLmOptions
from trainer.data.dataset import SizedDataset
from trainer.tasks import wordpiece
from trainer.tasks.classification import classification_loss
from trainer.tasks.sources import text_splits
from trainer.tasks.task import Task
from trainer.tasks.tokenised_text import tokenise, tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class BertSize(NamedTuple):
    """Size of an encoder."""

    layers: int
    dim: int
    heads: int


MASK = "[MASK]"
PRESETS = {"tiny": BertSize(2, 128, 2), "base": BertSize(12, 768, 12)}


class Sequences:
    """Dataset of consecutive windows of a tokenised text, each between [CLS] and [SEP]."""

    def __init__(self, tokens: Tensor, length: int, vocabulary: wordpiece.WordPieceVocabulary) -> None:
        self.inner = tokens.unfold(0, length - 2, length - 2)
        """A view ``[N, L - 2]`` of the mapped file."""
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.inner.shape[0]

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        tokens, indices = self.__getitems__([index])
        return tokens[0], indices[0]

    def __getitems__(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Return tokens ``[B, L]``, int32, and the samples' indices ``[B]``."""
        chosen = torch.as_tensor(indices)
        return F.pad(
            F.pad(self.inner[chosen], (1, 0), value=self.vocabulary.cls), (0, 1), value=self.vocabulary.sep
        ), chosen


class BertLayer(nn.Module):
    """BERT's encoder layer: normalisation comes after each sublayer's sum."""

    def __init__(self, shape: BertSize, dropout: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.attention_out = nn.Linear(shape.dim, shape.dim)
        self.attention_norm = nn.LayerNorm(shape.dim, eps=1e-12)
        self.mlp_in = nn.Linear(shape.dim, 4 * shape.dim)
        self.mlp_out = nn.Linear(4 * shape.dim, shape.dim)
        self.mlp_norm = nn.LayerNorm(shape.dim, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``; no attention mask, since every sample has full length."""
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, L, D / H]
        drop = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop)
        mixed = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, dim))
        x = self.attention_norm(x + self.dropout(mixed))
        y: Tensor = self.mlp_norm(x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(x)))))
        return y


class Bert(nn.Module):
    """BERT's encoder and masked-word head; its parameters are those of BERT, one for one."""

    def __init__(self, shape: BertSize, *, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, shape.dim)
        max_positions = 512  # rows of BERT's position embedding, for any sequence length
        self.positions = nn.Embedding(max_positions, shape.dim)
        # Without sentence pairs all tokens are of the first segment; the table keeps BERT's shape.
        self.segments = nn.Embedding(2, shape.dim)
        self.norm = nn.LayerNorm(shape.dim, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(shape, dropout) for _ in range(shape.layers))
        self.head = nn.Linear(shape.dim, shape.dim)
        self.head_norm = nn.LayerNorm(shape.dim, eps=1e-12)
        self.head_bias = nn.Parameter(torch.zeros(vocabulary))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, predicted: Tensor) -> Tensor:
        """Return logits ``[B, P, V]`` at the predicted positions ``[B, P]`` of the tokens ``[B, L]``.

        Only those positions go through the head: for BERT-base that saves most of its memory.
        """
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.segments.weight[0]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        x = x.gather(1, predicted.unsqueeze(2).expand(-1, -1, x.shape[2]))  # [B, P, D]
        x = self.head_norm(F.gelu(self.head(x)))
        return F.linear(x, self.words.weight, self.head_bias)


class MaskedLanguageModel(Task):
    """``--task masked_lm``: BERT pretraining on any text."""

    Options = MaskedLmOptions
    options: MaskedLmOptions
    loss_unit = "nats"

    def __init__(self, options: MaskedLmOptions) -> None:
        super().__init__(options)
        # As in BERT every sample has the same number of predictions: shapes are fixed, and counting them needs no
        # synchronisation with the device.
        self.predictions = max(1, round(options.mask_fraction * (options.sequence_length - 2)))
        self.count_per_sample = self.predictions
        self.vocabulary: wordpiece.WordPieceVocabulary
        """Vocabulary of ``datasets``."""
        self._splits: dict[str, Sequences] = {}
        self._tokenizer: Tokenizer
        self._restored: str | None = None

    def state_dict(self) -> Mapping[str, Any]:
        return {"tokenizer": self._tokenizer.to_str()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_tokenizers("task masked_lm")
        self._restored, source = str(state["tokenizer"]), "the checkpoint's tokenizer"
        self._tokenizer = tokenizer_of(self._restored, source)
        self.vocabulary = wordpiece.vocabulary_of(self._tokenizer, source=source)

    def datasets(self) -> Mapping[str, SizedDataset]:
        options = self.options
        require_tokenizers("task masked_lm")
        kind = wordpiece.kind_of(vocab_size=options.vocab_size, lowercase=options.lowercase)
        tokenised = tokenise(kind, text_splits(options), file=options.vocab, restored=self._restored)
        self._tokenizer, texts = tokenised.tokenizer, tokenised.texts
        self.vocabulary = wordpiece.vocabulary_of(self._tokenizer, source="the tokenizer")
        needed = options.sequence_length - 2
        for split, tokens in texts.items():
            if len(tokens) < needed:
                where = options.valid_data if split == "valid" and options.valid_data else options.data
                raise RequestError(
                    f"{where}: {len(tokens)} tokens in the {split} split, but one sample needs {needed}; "
                    f"lower sequence_length{' or change valid_fraction' if split == 'valid' else ''}"
                )
        length = options.sequence_length
        self._splits = {split: Sequences(tokens, length, self.vocabulary) for split, tokens in texts.items()}
        return self._splits

    def sizes(self, split: str) -> Sequence[int]:
        return [self.options.sequence_length] * len(self._splits[split])

    def model(self) -> nn.Module:
        return Bert(PRESETS[self.options.preset], vocabulary=self.vocabulary.size, dropout=self.options.dropout)

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Bert)
        return list(model.layers)

    def collate(self, samples: Any) -> tuple[Tensor, Tensor]:
        if isinstance(samples, tuple):
            return samples
        return torch.stack([tokens for tokens, _ in samples]), torch.stack([index for _, index in samples])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        """Mask the batch; return the summed cross-entropy in nats, the number of predictions, and the correct ones."""
        tokens, indices = batch
        tokens = tokens.long()
        inputs, predicted = self.mask(tokens, indices, training=model.training)
        targets = tokens.gather(1, predicted).flatten()
        logits = model(inputs, predicted).flatten(0, 1)  # [B * P, V]
        smoothing = self.options.label_smoothing if model.training else 0.0
        return classification_loss(logits, targets, label_smoothing=smoothing)

    def predict(self, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return each ``text`` with every ``[MASK]`` replaced, and the five most probable tokens of each."""
        return [self._fill(model, str(row["text"]), getattr(row, "where", "a row")) for row in rows]

    def _fill(self, model: nn.Module, text: str, where: str) -> Mapping[str, Any]:
        first, *others = text.split(MASK)
        if not others:
            raise RequestError(f"{where}: the text has no {MASK}, whose tokens are predicted")
        # Each part alone: a trained tokenizer knows no special token in a text, and would lower-case it.
        tokens = [self.vocabulary.cls, *self._encode(first)]
        places = []
        for part in others:
            places.append(len(tokens))
            tokens += [self.vocabulary.mask, *self._encode(part)]
        tokens.append(self.vocabulary.sep)
        if len(tokens) > (limit := self.options.sequence_length):
            raise RequestError(f"{where}: the text has {len(tokens)} tokens, but the model was trained on {limit}")
        device = next(model.parameters()).device
        logits = model(torch.tensor([tokens], device=device), torch.tensor([places], device=device))[0]
        shares, ids = logits.float().softmax(dim=1).topk(min(5, self.vocabulary.size), dim=1)  # each [P, 5]
        masks, filled = [], first
        for row, part in zip(zip(ids.tolist(), shares.tolist(), strict=True), others, strict=True):
            words = [self._tokenizer.id_to_token(each) or f"#{each}" for each in row[0]]  # ids may have gaps
            masks.append({"token": words[0], "probabilities": dict(zip(words, row[1], strict=True))})
            inner = words[0].startswith("##")  # it continues the word before it
            filled = (filled.rstrip() + words[0][2:] if inner else filled + words[0]) + part
        return {"text": filled, "masks": masks}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def mask(self, tokens: Tensor, indices: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """Mask tokens ``[B, L]`` as BERT does: of the chosen ones 80 % become [MASK], 10 % a random token, 10 % stay.

        In training the choice uses the device's random state, as dropout does: each epoch has new masks, and a
        checkpoint, which holds that state, resumes them exactly, with or without loader processes. In evaluation it
        depends on the sample alone, so the loss is comparable over time and on any number of ranks.

        Returns:
            The masked tokens ``[B, L]`` and the positions to predict ``[B, P]``.
        """
        choice, action, word = (
            torch.rand(3, *tokens.shape, device=tokens.device) if training else fixed_noise(indices, tokens.shape[1])
        )
        # [CLS] and [SEP] come last in the order of choice: they are predicted only where nothing else is left.
        fixed = (tokens == self.vocabulary.cls) | (tokens == self.vocabulary.sep)
        predicted = choice.masked_fill(fixed, -1.0).topk(self.predictions, dim=1).indices
        action, word = action.gather(1, predicted), word.gather(1, predicted)
        hidden = torch.where(action < 0.8, self.vocabulary.mask, tokens.gather(1, predicted))
        hidden = torch.where(action >= 0.9, (word * self.vocabulary.size).long(), hidden)
        return tokens.scatter(1, predicted, hidden), predicted


def fixed_noise(indices: Tensor, length: int) -> Tensor:
    """Return uniform numbers ``[3, B, L]`` in 0…1 that depend on the samples' indices ``[B]`` alone.

    Steele et al. 2014 (SplitMix64): a counter, mixed; int64 products wrap as they should.
    """
    counter = indices[:, None] * length + torch.arange(length, device=indices.device)
    counter = torch.stack([counter * 3 + draw for draw in range(3)])
    z = (counter + 1) * -7046029254386353131
    z = (z ^ _shifted_right(z, 30)) * -4658895280553007687
    z = (z ^ _shifted_right(z, 27)) * -7723592293110705685
    return _shifted_right(z ^ _shifted_right(z, 31), 40).float() / 2**24


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
