"""Text as the tokens of a tokenizer of the package ``tokenizers``, which a file holds or the text trains; cached."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.contract.errors import RequestError
from trainer.contract.task_files import require_file
from trainer.tasks import cache
from trainer.tasks.sources import Piece, Splits

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenizerKind:
    """How a task makes its tokenizer, and what it gives it to read."""

    name: str
    """Name of its cache entries, with the version of their layout."""
    settings: Any
    """What besides the text determines a trained tokenizer, as JSON values."""
    option: str
    """Option that names a file."""
    load: Callable[[Path], Tokenizer]
    train: Callable[[Sequence[Piece]], Tokenizer]
    read: Callable[[Sequence[Piece]], Iterator[str]]
    """Returns the text of a split in parts, each of which is tokenised alone."""
    separator: str | None = None
    """Token between two files; None: ``read`` gets all files of a split at once."""


@dataclass(frozen=True, kw_only=True)
class TokenisedText:
    """A tokenizer and what it made of a text."""

    tokenizer: Tokenizer
    texts: dict[str, Tensor]
    """Per split its tokens ``[N]``, int32."""


def tokenise(kind: TokenizerKind, splits: Splits, *, file: str | None, restored: str | None) -> TokenisedText:
    """Tokenise each split, or map it from the cache.

    Args:
        kind: the kind of tokenizer.
        splits: text of each split; a tokenizer is trained on ``train``.
        file: file of the tokenizer; None: train one.
        restored: JSON of the tokenizer with which the weights were trained; None: none.

    Raises:
        RequestError: the file is no tokenizer, or it is another one than the checkpoint's.
    """
    path = require_file(file) if file is not None else None
    inputs: dict[str, Any] = {
        **cache.fingerprint_splits(splits),
        "tokenizer": cache.fingerprint([path]) if path else None,
        "settings": kind.settings,
    }
    if restored is not None:
        if path and kind.load(path).to_str() != restored:
            raise RequestError(
                f"{path} is not the vocabulary that the weights were trained with; leave {kind.option} out to use "
                "theirs"
            )
        inputs["restored"] = hashlib.sha256(restored.encode()).hexdigest()

    def build(folder: Path) -> None:
        if restored is not None:
            tokenizer = tokenizer_of(restored, "the checkpoint's entry task_state")
        else:
            tokenizer = kind.load(path) if path else kind.train(splits["train"])
        tokenizer.save(str(folder / "tokenizer.json"))
        for split, pieces in splits.items():
            _write_tokens(tokenizer, kind, pieces, folder / f"{split}.bin")

    folder = cache.entry(kind.name, inputs, build)

    from tokenizers import Tokenizer

    texts = {split: cache.mapped(folder / f"{split}.bin", torch.int32) for split in splits}
    return TokenisedText(tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")), texts=texts)


def tokenizer_of(text: str, source: str) -> Tokenizer:
    """Return the tokenizer that the package ``tokenizers`` wrote as JSON, without its limits of length."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing more precise
        raise RequestError(f"{source} is not a tokenizer of the package tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_in(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``."""
    return tokenizer_of(read_vocabulary_file(path), str(path))


def read_vocabulary_file(path: Path) -> str:
    """Return the text of a tokenizer's file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a vocabulary: not UTF-8 text") from error


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the rows that an embedding needs: ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _write_tokens(tokenizer: Tokenizer, kind: TokenizerKind, pieces: Sequence[Piece], path: Path) -> None:
    parts_per_batch = 2048  # parts per call of the tokenizer, which splits them over its threads
    groups: Sequence[Sequence[Piece]] = [pieces]
    separator = array("i")
    if kind.separator is not None:
        groups, separator = [[piece] for piece in pieces], array("i", [tokenizer.get_vocab()[kind.separator]])
    with path.open("wb") as file:
        for index, group in enumerate(groups):
            if index:
                separator.tofile(file)
            parts = kind.read(group)
            while batch := list(islice(parts, parts_per_batch)):
                for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                    array("i", encoding.ids).tofile(file)
