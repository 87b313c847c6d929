"""PyText's DocNN: a sentence's class from convolutions over its words (Kim 2014).

Shapes: B sentences, L words of the longest one, E width of an embedding, K filters per kernel size, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainer.contract.errors import RequestError, nearest
from trainer.contract.task_files import saved_dataset
from trainer.contract.task_options import DocNNOptions
from trainer.data.dataset import SizedDataset
from trainer.tasks.classification import Classifier, class_predictions
from trainer.tasks.saved_dataset import read_saved_rows
from trainer.tasks.tsv import LabelledSentence, Table, read_tsv

UNKNOWN, PAD = 0, 1
"""Indices of unknown words and of padding."""


class Vocabulary(NamedTuple):
    """Words and labels that the model knows."""

    words: dict[str, int]
    """Lower-cased word to index, in order of appearance; 0 and 1 are unknown words and padding."""
    labels: dict[str, int]
    """Label to class, in alphabetical order."""

    @property
    def size(self) -> int:
        return len(self.words) + 2

    def indices(self, text: str) -> list[int]:
        """Return the index of each word of a text."""
        return [self.words.get(word, UNKNOWN) for word in split_words(text)]


class Sentences:
    """Dataset of encoded sentences and their classes."""

    def __init__(self, rows: Sequence[LabelledSentence], vocabulary: Vocabulary) -> None:
        words = [vocabulary.indices(row.text) for row in rows]
        self.lengths = [len(sentence) for sentence in words]
        flat = torch.tensor([word for sentence in words for word in sentence])
        self.sentences = torch.split(flat, self.lengths)
        """Word indices ``[length]`` of each sentence, views of one tensor."""
        self.classes = [vocabulary.labels[row.label] for row in rows]

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.sentences[index], self.classes[index]


class DocNN(nn.Module):
    """Embedding, convolutions, maximum over time, dropout, and one linear layer."""

    def __init__(self, options: DocNNOptions, *, words: int, classes: int) -> None:
        super().__init__()
        # Padding is the zero vector and is not trained. The convolutions pad with zeros by their kernel size,
        # so a window of zeros alone is part of every maximum: a sentence's class is then the same in any batch.
        self.embedding = nn.Embedding(words, options.embedding_dim, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[[UNKNOWN, PAD]] = 0.0
        self.convolutions = nn.ModuleList(
            nn.Conv1d(options.embedding_dim, options.kernel_num, size, padding=size) for size in options.kernel_sizes
        )
        self.dropout = nn.Dropout(options.dropout)
        self.output = nn.Linear(options.kernel_num * len(options.kernel_sizes), classes)

    def forward(self, words: Tensor) -> Tensor:
        """Map words ``[B, L]`` to logits ``[B, C]``."""
        x = self.embedding(words).transpose(1, 2)  # [B, E, L]
        pooled = [F.relu(convolution(x)).amax(dim=2) for convolution in self.convolutions]  # each [B, K]
        logits: Tensor = self.output(self.dropout(torch.cat(pooled, dim=1)))
        return logits


class DocNNTask(Classifier):
    """``--task docnn``: classify the sentences of TSV files."""

    Options = DocNNOptions
    options: DocNNOptions

    def __init__(self, options: DocNNOptions) -> None:
        super().__init__(options)
        self._splits: dict[str, Sentences] = {}
        self._vocabulary: Vocabulary
        self._restored: Vocabulary | None = None
        self._note = ""

    def data_note(self) -> str:
        return "; ".join(filter(None, [self._note, super().data_note()]))

    def state_dict(self) -> Mapping[str, Any]:
        """Return the words in the order of their indices, one a line, and the labels in the order of the classes."""
        learnt = {"words": "\n".join(self._vocabulary.words), "labels": list(self._vocabulary.labels)}
        return {**learnt, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use these words and labels in place of those of the training file."""
        super().load_state_dict(state)
        words = state["words"].split("\n") if state["words"] else []
        labels = {label: index for index, label in enumerate(state["labels"])}
        self._vocabulary = self._restored = Vocabulary({word: index + 2 for index, word in enumerate(words)}, labels)

    def datasets(self) -> Mapping[str, SizedDataset]:
        """Read the files; words and labels are those of the training file, or those that were restored.

        To restored labels the training file may add some: the model then fits the checkpoint no longer by its shape,
        and only a fine-tuning that leaves out the output layer can use it.
        """
        options = self.options
        paths = {"train": options.train_path, "valid": options.eval_path, "test": options.test_path}
        tables = {split: self._read(path) for split, path in paths.items() if path is not None}
        rows = {split: table.rows for split, table in tables.items()}
        self._note = _describe_tables({paths[split] or "": table for split, table in tables.items()})
        vocabulary = read_vocabulary(rows["train"])
        if self._restored is not None:
            labels = dict.fromkeys([*self._restored.labels, *vocabulary.labels])
            vocabulary = Vocabulary(self._restored.words, {label: index for index, label in enumerate(labels)})
        if len(vocabulary.labels) < 2:
            raise RequestError(f"{options.train_path}: every row has the label {rows['train'][0].label!r}")
        for split, table in tables.items():
            _refuse_unseen_labels(paths[split] or "", table, vocabulary)
        self._vocabulary = vocabulary
        self._splits = {split: Sentences(held, vocabulary) for split, held in rows.items()}
        self.weigh_classes(
            torch.tensor(self._splits["train"].classes), list(vocabulary.labels), source=options.train_path
        )
        return self._splits

    def _read(self, path: str) -> Table:
        text, label = self.options.text_column, self.options.label_column
        if (dataset := saved_dataset(path)) is not None:
            return read_saved_rows(dataset, text_column=text, label_column=label)
        return read_tsv(path, self.options.format, text_column=text, label_column=label)

    def model(self) -> nn.Module:
        return DocNN(self.options, words=self._vocabulary.size, classes=len(self._vocabulary.labels))

    def sparse_parameters(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """Return the embedding: a batch has a few hundred of its thousands of words."""
        return [parameter for name, parameter in model.named_parameters() if name == "embedding.weight"]

    def lengths(self, split: str) -> Sequence[int]:
        """Return the number of words per sentence: similar ones share a batch, as in PyText's pooling batcher."""
        return self._splits[split].lengths

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        """Return words ``[B, L]``, padded at the end, and classes ``[B]``."""
        words = pad_sequence([words for words, _ in samples], batch_first=True, padding_value=PAD)
        return words, torch.tensor([label for _, label in samples])

    def read_inputs(self, path: Path) -> Iterable[Mapping[str, Any]] | None:
        """Return the texts of a table with labels, as of the validation; None for lines, or another table."""
        try:
            return [{"text": row.text} for row in self._read(str(path)).rows] if path.suffix == ".tsv" else None
        except RequestError:
            return None

    def predict(self, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the label of each ``text`` and the probability of every label."""
        texts = [torch.tensor(self._vocabulary.indices(_text_of(row)) or [PAD]) for row in rows]
        words = pad_sequence(texts, batch_first=True, padding_value=PAD)
        logits = model(words.to(next(model.parameters()).device))
        return class_predictions(logits, list(self._vocabulary.labels), "label")


def _text_of(row: Mapping[str, Any]) -> str:
    """Return the text of an input; refuse the line of a table, whose label and header would count as words."""
    text = str(row["text"])
    if "\t" in text:
        raise RequestError(
            f"{getattr(row, 'where', 'a row')}: the text has a tab, as a line of several columns: give the column of "
            "texts alone, such as by cut -f1, or JSON objects with text"
        )
    return text


def split_words(text: str) -> list[str]:
    """Split at white space, in lower case."""
    return text.lower().split()


def read_vocabulary(rows: Sequence[LabelledSentence]) -> Vocabulary:
    """Collect all words and labels of the training rows."""
    words: dict[str, int] = {}
    for row in rows:
        for word in split_words(row.text):
            words.setdefault(word, len(words) + 2)
    labels = {label: index for index, label in enumerate(sorted({row.label for row in rows}))}
    return Vocabulary(words, labels)


def _describe_tables(tables: Mapping[str, Table]) -> str:
    """Describe in one line how the files were read, each layout once."""
    by_layout: dict[str, list[str]] = {}
    for path, table in tables.items():
        files = by_layout.setdefault(str(table.columns), [])
        if path not in files:
            files.append(path)
    first = next(iter(tables.values())).rows[0]
    text = first.text if len(first.text) <= 40 else f"{first.text[:39]}…"
    layouts = "; ".join(f"{', '.join(files)}: {layout}" for layout, files in by_layout.items())
    return f"{layouts}; the first row is {text!r} with the label {first.label!r}"


def _refuse_unseen_labels(path: str, table: Table, vocabulary: Vocabulary) -> None:
    for row in table.rows:
        if row.label not in vocabulary.labels:
            known = ", ".join(list(vocabulary.labels)[:10])
            # The first line may be a header that was read as a row.
            header = table.unit == "line" and row.line == 1
            hint = "; is it a header? Then name its columns by text_column and label_column" if header else ""
            raise RequestError(
                f"{path}, {table.unit} {row.line}: label {row.label!r} does not occur in the training file, which has "
                f"{known}{nearest(row.label, vocabulary.labels) or hint}"
            )
