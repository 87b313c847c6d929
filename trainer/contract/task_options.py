"""Options of the built-in tasks; torch-free, so that the console can render and check them.

Paths are relative to the folder in which the command is typed, as for every other command; ``~`` is the home folder.
No name here may be a name of ``trainer.contract.options``: a task's options and the trainer's share one command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainer.contract.errors import RequestError
from trainer.contract.task_files import idx_file, require_file, text_files

Text = Annotated[
    str,
    Meta(
        description="text to learn: a file, a glob such as 'books/**/*.txt', a folder, or the word stdlib for the "
        "source of Python's own standard library; bytes are bytes, no encoding is assumed",
        extra={"group": "Data", "per_rank": True},
    ),
]
ValidText = Annotated[
    str,
    Meta(
        description="text to validate on, named like data; default: the end of data",
        extra={"group": "Data", "per_rank": True},
    ),
]
Pattern = Annotated[
    tuple[str, ...],
    Meta(description="which files of a folder are read, at any depth", extra={"group": "Data"}),
]
ValidFraction = Annotated[
    float,
    Meta(
        ge=0,
        lt=1,
        description="share of data, from its end, that is held out for validation; 0: none",
        extra={"group": "Data"},
    ),
]
Dropout = Annotated[float, Meta(ge=0, lt=1, description="dropout probability", extra={"group": "Model"})]

TEXT_PATTERN = ("*.txt", "*.md", "*.py")


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a language model's text, for ``lm`` and ``masked_lm``."""

    data: Text
    valid_data: ValidText | None = None
    pattern: Pattern = TEXT_PATTERN
    valid_fraction: ValidFraction = 0.05

    def check_data(self) -> None:
        """Check that the text exists, without reading it.

        Raises:
            RequestError: a missing, unreadable or empty file, or a folder without any that match.
        """
        for source in (self.data, self.valid_data):
            if source is not None:
                text_files(source, self.pattern)


class LmOptions(TextOptions, kw_only=True, forbid_unknown_fields=True):
    """A byte-level Transformer decoder."""

    context: Annotated[
        int, Meta(ge=1, description="bytes that a prediction may look back on", extra={"group": "Model"})
    ] = 128
    dim: Annotated[int, Meta(ge=1, description="width of the model", extra={"group": "Model"})] = 128
    layers: Annotated[int, Meta(ge=1, description="Transformer blocks", extra={"group": "Model"})] = 4
    heads: Annotated[int, Meta(ge=1, description="attention heads; divides dim", extra={"group": "Model"})] = 4
    dropout: Dropout = 0.0
    prompt: Annotated[str, Meta(description="what the sample at the end starts with", extra={"group": "Sample"})] = "\n"
    sample_bytes: Annotated[
        int, Meta(ge=0, description="length of the sample at the end, bytes; 0: none", extra={"group": "Sample"})
    ] = 240
    temperature: Annotated[
        float,
        Meta(gt=0, description="how adventurous the sample is; below 1 is more careful", extra={"group": "Sample"}),
    ] = 0.7

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise RequestError(f"heads is {self.heads}, but must divide dim, which is {self.dim}")
        if self.dim // self.heads % 2:
            raise RequestError(f"dim / heads is {self.dim // self.heads}, but must be even; change dim or heads")


class DocNNOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PyText's DocNN: convolutions over word embeddings classify a sentence."""

    train_path: Annotated[
        str,
        Meta(
            description="TSV file to train on; it gives the words and the labels",
            extra={"group": "Data", "per_rank": True},
        ),
    ]
    eval_path: (
        Annotated[
            str, Meta(description="TSV file to validate on; default: none", extra={"group": "Data", "per_rank": True})
        ]
        | None
    ) = None
    test_path: (
        Annotated[
            str,
            Meta(
                description="TSV file to test on at the end; default: none", extra={"group": "Data", "per_rank": True}
            ),
        ]
        | None
    ) = None
    format: Annotated[
        Literal["auto", "text_label", "label_text", "glue"],
        Meta(
            description="columns of the TSV files: glue has a header with sentence and label; auto looks",
            extra={"group": "Data"},
        ),
    ] = "auto"
    embedding_dim: Annotated[int, Meta(ge=1, description="width of a word's embedding", extra={"group": "Model"})] = 100
    kernel_num: Annotated[
        int, Meta(ge=1, description="convolution filters per kernel size", extra={"group": "Model"})
    ] = 100
    kernel_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(min_length=1, description="words that a filter sees at once", extra={"group": "Model"}),
    ] = (3, 4)
    dropout: Dropout = 0.4

    def check_data(self) -> None:
        """Check that the files exist, without reading them.

        Raises:
            RequestError: a missing, unreadable or empty file.
        """
        for path in (self.train_path, self.eval_path, self.test_path):
            if path is not None:
                require_file(path)


class MnistOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """HetSeq's digit recognition."""

    data: Annotated[
        str,
        Meta(
            description="folder of MNIST's four IDX files, compressed (.gz) or not",
            extra={"group": "Data", "per_rank": True},
        ),
    ]
    valid_subset: Annotated[
        Literal["test", "none"],
        Meta(description="validate on the test images, as HetSeq does, or not at all", extra={"group": "Data"}),
    ] = "test"

    def check_data(self) -> None:
        """Check that all four files exist.

        Raises:
            RequestError: a missing folder or file.
        """
        for split in ("train", "t10k"):
            for kind in ("images-idx3", "labels-idx1"):
                idx_file(Path(self.data), f"{split}-{kind}-ubyte")


class MaskedLmOptions(TextOptions, kw_only=True, forbid_unknown_fields=True):
    """BERT pretraining: predict masked words from both sides."""

    vocab: (
        Annotated[
            str,
            Meta(
                description="WordPiece to use: a tokenizer.json or BERT's vocab.txt; default: train one on data",
                extra={"group": "Data", "per_rank": True},
            ),
        ]
        | None
    ) = None
    vocab_size: Annotated[
        int, Meta(ge=64, description="size of the vocabulary that is trained", extra={"group": "Data"})
    ] = 8192
    lowercase: Annotated[
        bool,
        Meta(
            description="lower-case the text and drop accents; a tokenizer.json decides itself", extra={"group": "Data"}
        ),
    ] = True
    preset: Annotated[
        Literal["tiny", "base"],
        Meta(
            description="tiny: 2 layers of 128 with 2 heads; base: BERT-base, 12 layers of 768 with 12 heads",
            extra={"group": "Model"},
        ),
    ] = "tiny"
    sequence_length: Annotated[
        int,
        Meta(ge=8, le=512, description="tokens of a sample, with [CLS] and [SEP]", extra={"group": "Model"}),
    ] = 128
    mask_fraction: Annotated[
        float, Meta(gt=0, lt=1, description="share of the tokens that is predicted", extra={"group": "Model"})
    ] = 0.15
    dropout: Dropout = 0.1

    def check_data(self) -> None:
        """Check that the text and the vocabulary exist, without reading them.

        Raises:
            RequestError: a missing, unreadable or empty file.
        """
        super().check_data()
        if self.vocab is not None:
            require_file(self.vocab)
