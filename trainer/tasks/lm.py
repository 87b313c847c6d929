"""Language model: a Transformer decoder that predicts the next token of any text, which is a byte by default.

Shapes: B samples, T tokens of context, D width, H heads, V tokens of the vocabulary: 256 byte values by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.errors import RequestError
from trainer.contract.task_files import require_tokenizers
from trainer.contract.task_options import LmOptions
from trainer.data.dataset import SizedDataset
from trainer.tasks import byte_bpe, cache
from trainer.tasks.sources import Splits, bytes_of, fingerprint_splits, read_pieces, text_splits
from trainer.tasks.task import Task
from trainer.tasks.tokenised_text import tokenise, tokenizer_of, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_VALUES = 256


class Windows:
    """Dataset of consecutive windows of a text, each with the token that follows it."""

    def __init__(self, text: Tensor, context: int) -> None:
        assert len(text) > context
        # Neighbours share one token: the last target of one window is the first input of the next.
        self.windows = text.unfold(0, context + 1, context)
        """A view ``[N, T + 1]`` of the mapped file: making it reads nothing."""

    def __len__(self) -> int:
        return self.windows.shape[0]

    def __getitem__(self, index: int, /) -> Tensor:
        return self.windows[index]

    def __getitems__(self, indices: Sequence[int], /) -> Tensor:
        """Return ``[B, T + 1]`` with one gather instead of B small copies."""
        return self.windows[torch.as_tensor(indices)]


class DecoderBlock(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D / H]
        query, key = rotate(query, *angles), rotate(key, *angles)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        mixed = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, dim))
        x = x + F.dropout(mixed, self.dropout, self.training)
        hidden = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to ``[B, H, T, D / H]``; the angles are ``[T, D / H]``.

    In a short training attention forms several times sooner than with a learned position embedding.
    """
    return (x * cosine + x.roll(x.shape[-1] // 2, -1) * sine).type_as(x)


class Decoder(nn.Module):
    """Embedding, blocks, and an output that shares the embedding's weights (Press and Wolf 2017)."""

    def __init__(self, options: LmOptions, *, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, options.dim)
        self.cosine: Tensor
        self.sine: Tensor
        cosine, sine = _angles(options.context, options.dim // options.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.blocks = nn.ModuleList(
            DecoderBlock(options.dim, options.heads, options.dropout) for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(options.dim)
        self._initialise(options.layers)

    def _initialise(self, layers: int) -> None:
        """Initialise as GPT-2: N(0, 0.02), scaled down for projections into the residual stream.

        The embedding, which is also the output layer, starts smaller, so that logits are near 0 and the first loss
        near ln V: 5.55 nats for bytes.
        """
        for name, parameter in self.named_parameters():
            if name == "embedding.weight":
                nn.init.normal_(parameter, std=0.01)
            elif name.endswith(("attention_out.weight", "mlp_out.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        """Map tokens ``[B, T]`` to logits ``[B, T, V]`` of the token that follows each."""
        length = text.shape[1]
        angles = self.cosine[:length], self.sine[:length]
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, angles)
        return F.linear(self.norm(x), self.embedding.weight)


def _angles(context: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines ``[T, width]`` for ``rotate``."""
    turns = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(context)[:, None] * turns  # [T, width / 2]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], dim=1), torch.cat([-sine, sine], dim=1)


class LanguageModel(Task):
    """``--task lm``: prediction of the next byte or token on any text."""

    Options = LmOptions
    options: LmOptions
    loss_unit = "nats"
    lower_is_better = ("bits_per_byte",)

    def __init__(self, options: LmOptions) -> None:
        super().__init__(options)
        self.count_per_sample = options.context
        self._splits: dict[str, Windows] = {}
        self._tokenizer: Tokenizer | None = None
        """None: the tokens are bytes."""
        self._restored: str | None = None
        self._bytes_per_token = 1.0
        """Of the text that is validated on."""
        self._note = ""

    def data_note(self) -> str:
        return self._note

    def state_dict(self) -> Mapping[str, Any]:
        """Return the tokenizer, if there is one."""
        return {} if self._tokenizer is None else {"tokenizer": self._tokenizer.to_str()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (saved := state.get("tokenizer")) is not None:
            require_tokenizers("a tokenizer of task lm")
            self._restored = str(saved)
            self._tokenizer = tokenizer_of(self._restored, "the checkpoint's tokenizer")

    def datasets(self) -> Mapping[str, SizedDataset]:
        options = self.options
        texts, unit = self._tokens(text_splits(options))
        for split, text in texts.items():
            if len(text) > options.context:
                continue
            needed = f"a window needs {options.context + 1} (context {options.context} and the {unit} to predict)"
            if split == "valid" and options.valid_data is None:
                raise RequestError(
                    f"{options.data}: its held-out end has {len(text)} {unit}s, but {needed}; "
                    "raise valid_fraction (0: no validation) or lower context"
                )
            where, use = (options.data, "learn") if split == "train" else (options.valid_data, "validate on")
            raise RequestError(f"{where}: {len(text)} {unit}s to {use}, but {needed}")
        self._splits = {split: Windows(text, options.context) for split, text in texts.items()}
        return self._splits

    def _tokens(self, splits: Splits) -> tuple[dict[str, Tensor], str]:
        """Return the tokens ``[N]`` of each split, and what a token is."""
        options = self.options
        if options.tokenizer is None and options.vocab_size is None and self._restored is None:
            return byte_tensors(splits), "byte"
        require_tokenizers("a tokenizer of task lm")
        kind = byte_bpe.kind_of(vocab_size=options.vocab_size)
        tokenised = tokenise(kind, splits, file=options.tokenizer, restored=self._restored)
        self._tokenizer, texts = tokenised.tokenizer, tokenised.texts
        measured = "valid" if "valid" in splits else "train"
        self._bytes_per_token = bytes_of(splits[measured]) / max(len(texts[measured]), 1)
        source = "of the checkpoint" if self._restored else options.tokenizer or f"trained on {options.data}"
        size = f"{vocabulary_size(self._tokenizer):,} tokens, {self._bytes_per_token:.3g} bytes per token"
        self._note = f"tokenizer {source}: {size}"
        return texts, "token"

    def sizes(self, split: str) -> Sequence[int]:
        return [self.options.context] * len(self._splits[split])

    def model(self) -> nn.Module:
        return Decoder(self.options, vocabulary=vocabulary_size(self._tokenizer) if self._tokenizer else BYTE_VALUES)

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Decoder)
        return list(model.blocks)

    def collate(self, samples: Any) -> Tensor:
        """Return tokens ``[B, T + 1]``; bytes stay bytes until they are on the device."""
        return samples if isinstance(samples, Tensor) else torch.stack(samples)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        """Return the summed cross-entropy in nats over all tokens of the batch ``[B, T + 1]``.

        A validation's is without smoothing and z-loss, and has the bits per byte, by which tokenizers compare.
        """
        text = batch.long()
        logits = model(text[:, :-1]).flatten(0, 1)  # [B * T, V]
        smoothing, z_loss = (self.options.label_smoothing, self.options.z_loss) if model.training else (0.0, 0.0)
        total = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum", label_smoothing=smoothing)
        if z_loss:  # Chowdhery et al. 2022, section 5
            log_z = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1)
            total = total + z_loss * log_z.square().sum()
        bits = {} if model.training else {"bits_per_byte": total.detach() / (math.log(2) * self._bytes_per_token)}
        return total, batch.shape[0] * (batch.shape[1] - 1), bits

    def sample(self, model: nn.Module) -> str | None:
        if not self.options.sample_bytes:
            return None
        training = model.training
        model.eval()
        with torch.no_grad():
            text = self._continued(model, self.options.prompt)
        model.train(training)
        return decode_printable(text)

    def predict(self, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return each ``text`` continued by ``sample_bytes`` bytes, with a tokenizer by the tokens that reach them."""
        return [{"text": self._continued(model, str(row["text"])).decode("utf-8", "replace")} for row in rows]

    def _continued(self, model: nn.Module, prompt: str) -> bytes:
        """Return a text with ``sample_bytes`` more, drawn with the same random numbers for each."""
        device = next(model.parameters()).device
        # A separate generator, so that the random state of the training does not change.
        generator = torch.Generator().manual_seed(0)
        tokens = self._encode(prompt or "\n") or [0]  # a tokenizer may drop white space
        begun = len(tokens)
        for _ in range(self.options.sample_bytes):
            if len(self._decode(tokens[begun:])) >= self.options.sample_bytes:
                break
            seen = torch.tensor([tokens[-self.options.context :]], device=device)
            logits = model(seen)[0, -1].float().cpu() / self.options.temperature
            tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        return self._decode(tokens)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, tokens: Sequence[int]) -> bytes:
        if self._tokenizer is None:
            return bytes(tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False)).encode()


def byte_tensors(splits: Splits) -> dict[str, Tensor]:
    """Join the pieces of each split into one mapped tensor of bytes ``[N]``, uint8."""

    def build(folder: Path) -> None:
        for split, pieces in splits.items():
            with (folder / f"{split}.bin").open("wb") as file:
                file.writelines(read_pieces(pieces))

    folder = cache.entry("bytes1", fingerprint_splits(splits), build)
    return {split: cache.mapped(folder / f"{split}.bin", torch.uint8) for split in splits}


def decode_printable(text: bytes) -> str:
    """Decode generated bytes; control characters, which could command a terminal, become dots."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "·" for char in text.decode("utf-8", errors="replace")
    )
