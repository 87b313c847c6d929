"""Options of the built-in tasks; torch-free, so that the console can render and check them.

Relative paths start at the working directory; ``~`` is the home folder. No name here may be a name of
``trainer.contract.options``: a task's options and the trainer's share one command line.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.schema import Positives, option_meta
from trainer.contract.task_files import (
    SavedDataset,
    idx_file,
    require_file,
    require_tokenizers,
    saved_dataset,
    text_files,
)

_data, _model, _loss, _sample = (partial(option_meta, group) for group in ("Data", "Model", "Loss", "Sample"))

Dropout = Annotated[float, _model("dropout probability", ge=0, lt=1)]
LabelSmoothing = Annotated[float, _loss("label smoothing in training; a validation's loss is without it", ge=0, lt=1)]
BALANCED = "balanced"
"""Value of ``class_weights``: each class weighs in inverse proportion to its training samples."""

COLUMN = "its name in the header or dataset, or its number from 0; default: by the usual names, else by format"
"""End of the help of ``text_column`` and ``label_column``."""
TEXT_PATTERN = ("*.txt", "*.md", "*.py")


class BuiltInOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a built-in task, with what is known of the task without torch."""

    has_sizes: ClassVar[bool] = False
    """Whether the task gives the tokens of each sample."""
    has_checkpointed_modules: ClassVar[bool] = False
    """Whether the task names modules whose activations may be computed again."""
    has_repeated_block: ClassVar[bool] = False
    """Whether the task's model has a repeated block, by which it may be divided among the ranks."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that the task makes of its data."""
        return ("train",)


class TextOptions(BuiltInOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of the text for ``lm`` and ``masked_lm``."""

    has_sizes: ClassVar[bool] = True
    has_checkpointed_modules: ClassVar[bool] = True
    has_repeated_block: ClassVar[bool] = True

    data: Annotated[
        str,
        _data(
            "text to learn: a file, a glob such as 'books/**/*.txt', a folder, or the word stdlib for the "
            "source of Python's own standard library, read as bytes, no encoding is assumed; or the folder of a "
            "dataset that Hugging Face's datasets saved",
            per_rank=True,
        ),
    ]
    valid_data: Annotated[
        str | None, _data("text to validate on, named like data; default: the end of data", per_rank=True)
    ] = None
    pattern: Annotated[tuple[str, ...], _data("which files of a folder are read, at any depth")] = TEXT_PATTERN
    text_column: Annotated[
        str | None, _data("column of a saved dataset: its name; default: one with a usual name, such as text")
    ] = None
    valid_fraction: Annotated[
        float, _data("share of data, from its end, that is held out for validation; 0: none", ge=0, lt=1)
    ] = 0.05

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "valid") if self.valid_data or self.valid_fraction else ("train",)

    def check_data(self) -> None:
        """Check that the text exists, without reading it."""
        for source in (self.data, self.valid_data):
            if source is None:
                continue
            if (dataset := self.saved_dataset(source)) is not None:
                dataset.text_column(self.text_column)
            else:
                text_files(source, self.pattern)

    def saved_dataset(self, source: str) -> SavedDataset | None:
        """Return the dataset in a folder; None for text, which has no columns."""
        dataset = saved_dataset(source)
        if dataset is None and self.text_column is not None:
            raise RequestError(
                f"text_column is {quoted(self.text_column)}, but {source} is no folder that the package datasets saved"
            )
        return dataset


class LmOptions(TextOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of ``lm``, a Transformer decoder over bytes or the tokens of a tokenizer."""

    tokenizer: Annotated[
        str | None, _data("tokenizer.json of the package tokenizers; default: the tokens are the bytes", per_rank=True)
    ] = None
    vocab_size: (
        Annotated[int, _data("train a byte-level BPE of this many tokens on data; default: none", ge=257)] | None
    ) = None
    context: Annotated[int, _model("tokens of context for a prediction; bytes without a tokenizer", ge=1)] = 128
    dim: Annotated[int, _model("width of the model", ge=1)] = 128
    layers: Annotated[int, _model("Transformer blocks", ge=1)] = 4
    heads: Annotated[int, _model("attention heads; divides dim", ge=1)] = 4
    dropout: Dropout = 0.0
    prompt: Annotated[str, _sample("first text of the sample at the end")] = "\n"
    sample_bytes: Annotated[int, _sample("length of the sample at the end, bytes; 0: none", ge=0)] = 240
    temperature: Annotated[float, _sample("sampling temperature; below 1: less random", gt=0)] = 0.7
    label_smoothing: LabelSmoothing = 0.0
    z_loss: Annotated[
        float,
        _loss("factor of (log Z)² per token in training, which keeps the logits small: 0.0001 in PaLM; 0: none", ge=0),
    ] = 0.0

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.vocab_size is not None:
            raise RequestError(
                f"vocab_size is {self.vocab_size}, but tokenizer {quoted(self.tokenizer)} has its own: leave one out"
            )
        if self.dim % self.heads:
            raise RequestError(f"heads is {self.heads}, but must divide dim, which is {self.dim}")
        if self.dim // self.heads % 2:
            raise RequestError(f"dim / heads is {self.dim // self.heads}, but must be even; change dim or heads")

    def check_data(self) -> None:
        super().check_data()
        if self.tokenizer is not None or self.vocab_size is not None:
            require_tokenizers("a tokenizer of task lm")
        if self.tokenizer is not None:
            require_file(self.tokenizer)


class DocNNOptions(BuiltInOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of ``docnn``, PyText's DocNN: convolutions over word embeddings classify a sentence."""

    train_path: Annotated[
        str,
        _data(
            "TSV file to train on, or the folder of a dataset that Hugging Face's datasets saved; it gives the words "
            "and the labels",
            per_rank=True,
        ),
    ]
    eval_path: Annotated[str | None, _data("TSV file to validate on; default: none", per_rank=True)] = None
    test_path: Annotated[str | None, _data("TSV file to test on at the end; default: none", per_rank=True)] = None
    format: Annotated[
        Literal["auto", "text_label", "label_text", "glue", "no_header"],
        _data(
            "columns of the TSV files: glue has a header with sentence and label; no_header: line 1 is a row, and the "
            "columns have numbers, 0 and 1 by default; auto: detect"
        ),
    ] = "auto"
    text_column: Annotated[str | None, _data(f"column of the sentences: {COLUMN}", or_kind="int")] = None
    label_column: Annotated[str | None, _data(f"column of the labels: {COLUMN}", or_kind="int")] = None
    embedding_dim: Annotated[int, _model("width of a word's embedding", ge=1)] = 100
    kernel_num: Annotated[int, _model("convolution filters per kernel size", ge=1)] = 100
    kernel_sizes: Annotated[Positives, _model("widths of the filters, in words")] = (3, 4)
    dropout: Dropout = 0.4
    label_smoothing: LabelSmoothing = 0.0
    class_weights: Annotated[
        str | None,
        _loss(
            "weights of the classes in the training loss, which is divided by the sum of its samples' weights: one "
            "number per label, in alphabetical order, or balanced, as rare labels in the training file weigh more",
            or_kind="list",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.class_weights is not None:
            listed_weights(self.class_weights)
        for name in ("text_column", "label_column"):
            column = getattr(self, name)
            if column is None or self.format == "auto":
                continue
            if self.format == "no_header" and not column.isdecimal():
                raise RequestError(
                    f"{name} is {quoted(column)}, but format is no_header, so that no line names the columns: "
                    "give the column's number, from 0"
                )
            if self.format != "no_header":
                raise RequestError(
                    f"{name} is {quoted(column)}, but format is {self.format}, which fixes both columns; "
                    "leave out one of them"
                )

    @property
    def splits(self) -> tuple[str, ...]:
        given = {"train": self.train_path, "valid": self.eval_path, "test": self.test_path}
        return tuple(split for split, path in given.items() if path is not None)

    def check_data(self) -> None:
        for path in (self.train_path, self.eval_path, self.test_path):
            if path is None:
                continue
            if (dataset := saved_dataset(path)) is not None:
                dataset.columns(self.text_column, self.label_column)
            else:
                require_file(path)


class MnistOptions(BuiltInOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of ``mnist``, HetSeq's digit recognition."""

    data: Annotated[str, _data("folder of MNIST's four IDX files, compressed (.gz) or not", per_rank=True)]
    valid_subset: Annotated[
        Literal["test", "none"], _data("validate on the test images, as HetSeq does, or not at all")
    ] = "test"
    label_smoothing: LabelSmoothing = 0.0
    class_weights: Annotated[
        str | None,
        _loss(
            "weights of the digits in the training loss, which is divided by the sum of its images' weights: ten "
            "numbers, or balanced, as rare digits in the training images weigh more",
            or_kind="list",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.class_weights is not None and (weights := listed_weights(self.class_weights)) and len(weights) != 10:
            raise RequestError(f"class_weights has {len(weights)} numbers, but there are 10 digits")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "valid", "test") if self.valid_subset == "test" else ("train", "test")

    def check_data(self) -> None:
        for split in ("train", "t10k"):
            for kind in ("images-idx3", "labels-idx1"):
                idx_file(Path(self.data), f"{split}-{kind}-ubyte")


class MaskedLmOptions(TextOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of ``masked_lm``, BERT pretraining: predict masked tokens from both sides."""

    vocab: Annotated[
        str | None,
        _data("WordPiece to use: a tokenizer.json or BERT's vocab.txt; default: train one on data", per_rank=True),
    ] = None
    vocab_size: Annotated[int, _data("size of the vocabulary that is trained", ge=64)] = 8192
    lowercase: Annotated[bool, _data("lower-case the text and drop accents; a tokenizer.json has its own setting")] = (
        True
    )
    preset: Annotated[
        Literal["tiny", "base"],
        _model("tiny: 2 layers of 128 with 2 heads; base: BERT-base, 12 layers of 768 with 12 heads"),
    ] = "tiny"
    sequence_length: Annotated[int, _model("tokens of a sample, with [CLS] and [SEP]", ge=8, le=512)] = 128
    mask_fraction: Annotated[float, _model("share of the tokens that is predicted", gt=0, lt=1)] = 0.15
    dropout: Dropout = 0.1
    label_smoothing: LabelSmoothing = 0.0

    def check_data(self) -> None:
        super().check_data()
        require_tokenizers("task masked_lm")
        if self.vocab is not None:
            require_file(self.vocab)


def listed_weights(class_weights: str) -> tuple[float, ...] | None:
    """Return the weights of the classes in a text such as ``1, 2.5``; None for ``balanced``."""
    if class_weights == BALANCED:
        return None
    try:
        weights = tuple(float(each) for each in class_weights.strip("[] ").split(","))
    except ValueError:
        weights = ()
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise RequestError(
            f"class_weights is {quoted(class_weights)}, but must be {BALANCED}, or numbers above 0, such as 1, 2.5"
            f"{nearest(class_weights, [BALANCED])}"
        )
    return weights
