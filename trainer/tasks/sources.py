"""Splitting of text files into training and validation pieces, and reading of these; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainer.contract.errors import RequestError
from trainer.contract.task_files import refuse_unreadable, text_files
from trainer.contract.task_options import TextOptions


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Byte range of a file."""

    path: Path
    start: int
    end: int


Splits = Mapping[str, Sequence[Piece]]


def text_splits(options: TextOptions) -> Splits:
    """Return the pieces of ``train`` and, if it has any, of ``valid``: its own text, or the tail of the other."""
    files = text_files(options.data, options.pattern)
    train, valid = split_tail(files, 0.0 if options.valid_data else options.valid_fraction)
    if options.valid_data:
        valid, _ = split_tail(text_files(options.valid_data, options.pattern), 0.0)
    return {"train": train, "valid": valid} if valid else {"train": train}


def split_tail(files: Sequence[Path], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """Split the concatenated files into training pieces and a validation tail, a ``fraction`` of the bytes.

    The split moves to the next line end where one is near, so that no line is in both.
    """
    sizes = [file.stat().st_size for file in files]
    remaining = int(sum(sizes) * (1 - fraction))
    train: list[Piece] = []
    valid: list[Piece] = []
    for path, size in zip(files, sizes, strict=True):
        cut = min(remaining, size)
        remaining -= cut
        if 0 < cut < size:
            cut = _line_end(path, cut)
        if cut:
            train.append(Piece(path=path, start=0, end=cut))
        if cut < size and fraction:
            valid.append(Piece(path=path, start=cut, end=size))
    return train, valid


def _line_end(path: Path, position: int) -> int:
    """Return the position after the next line end; ``position`` itself if none is near."""
    with refuse_unreadable(path), path.open("rb") as file:
        file.seek(position)
        line_end = file.read(4096).find(b"\n")
    return position + line_end + 1 if line_end >= 0 else position


def bytes_of(pieces: Sequence[Piece]) -> int:
    """Return the bytes that ``read_pieces`` yields."""
    joints = sum(piece.path != before.path for before, piece in pairwise(pieces))
    return joints + sum(piece.end - piece.start for piece in pieces)


def read_pieces(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Yield the pieces in blocks of at most 4 MiB, with a line feed between two files."""
    for index, piece in enumerate(pieces):
        if index and piece.path != pieces[index - 1].path:
            yield b"\n"
        with refuse_unreadable(piece.path), piece.path.open("rb") as file:
            file.seek(piece.start)
            remaining = piece.end - piece.start
            while remaining:
                chunk = file.read(min(remaining, 1 << 22))
                if not chunk:
                    raise RequestError(f"{piece.path} became shorter while it was read")
                remaining -= len(chunk)
                yield chunk
