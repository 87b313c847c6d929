"""Trailer of a checkpoint file: its size, its place among the saves of its folder, the run it belongs to, a checksum.

Torch-free: the console reads it to tell the checkpoints of one run from those of another in the same folder.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer.contract.errors import CheckpointError

MAGIC = b"gputrain ckpt 2\n"
_HEAD = struct.Struct("<16sQQQ")
"""Magic, size of the payload in bytes, length of the run's id, which precedes it, sequence number in the folder."""
DIGEST_BYTES = 32
"""Length of the BLAKE2b of everything before it, at the end of the file."""
MAX_SEQUENCE = 2**64 - 1
"""Highest sequence number that a file can have."""


class Trailer(NamedTuple):
    """Trailer of a file; ``payload`` is the number of bytes before it."""

    payload: int
    sequence: int
    """Higher in a later save of the folder: a counter, as clocks may be set back."""
    run: str
    """Id of the run that the file belongs to; empty if it was trained without a run directory."""
    head: bytes
    """The trailer's own bytes before the digest, which covers them."""
    digest: bytes


def head_of(*, payload: int, sequence: int, run: str) -> bytes:
    """Return the trailer's bytes, without the digest."""
    encoded = run.encode(errors="surrogateescape")
    return encoded + _HEAD.pack(MAGIC, payload, len(encoded), sequence)


def read_trailer(path: Path, file: BinaryIO) -> Trailer:
    """Read the trailer of an open file; the checksum is not verified.

    Raises:
        CheckpointError: the file is torn or not a checkpoint of this package.
    """
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise CheckpointError(f"{path}: is empty")
    start = size - _HEAD.size - DIGEST_BYTES
    file.seek(max(start, 0))
    tail = file.read(_HEAD.size + DIGEST_BYTES)
    if len(tail) == _HEAD.size + DIGEST_BYTES and tail.startswith(MAGIC):
        _, payload, length, sequence = _HEAD.unpack(tail[: _HEAD.size])
        if payload + length == start:
            file.seek(payload)
            run = file.read(length)
            head, digest = run + tail[: _HEAD.size], tail[_HEAD.size :]
            return Trailer(payload, sequence, run.decode(errors="surrogateescape"), head, digest)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(f"{path}: is not a checkpoint")
    raise CheckpointError(f"{path}: is incomplete, or was written by another program: its checksum is missing")


def trailer_of(path: Path) -> Trailer | None:
    """Return the trailer of a file; None if it has none or cannot be read."""
    try:
        if not path.is_file():  # opening a pipe without a writer would block
            return None
        with path.open("rb") as file:
            return read_trailer(path, file)
    except (CheckpointError, OSError):
        return None


def owner_of(path: Path) -> str:
    """Return the id of the run that a checkpoint belongs to; empty if it records none or is no checkpoint."""
    trailer = trailer_of(path)
    return trailer.run if trailer is not None else ""
