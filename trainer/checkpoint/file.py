"""One checkpoint's file: how it gets onto the disk whole, and how it is known to be.

What ``torch.load(path, weights_only=True)`` reads anywhere is followed by a trailer with a checksum. A file appears
under its name only when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.contract.errors import CheckpointError

BEST = "best.pt"
"""The best checkpoint so far: a further name of the file of its step."""
EPOCH = "epoch_{}.pt"
"""A further name of the file of the step at which an epoch ended, where those are kept."""

MAGIC = b"gputrain ckpt 1\n"
_TRAILER = struct.Struct("<16sQQ32s")
"""Magic, size of the payload in bytes, place in the folder's order, BLAKE2b of all that precedes it."""
LAST_PLACE = 2**64 - 1
"""The highest place that a file can have."""
_CHUNK = 1 << 22
"""Bytes read at once."""
_TEMPORARY = ".{name}.tmp"


class _Checked:
    """A file for ``torch.save`` that hashes what passes through it and keeps a failure for later.

    An exception from within torch's C++ writer comes out as another one, and its destructor may abort the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.blake2b(digest_size=32)
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.hash.update(data)
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the file is flushed and synced once, at the end."""


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:08d}.pt"


def write_file(path: Path, state: Mapping[str, Any], *, place: int = 0) -> int:
    """Write a checkpoint under a temporary name, sync it and give it its name; return its size in bytes.

    Args:
        path: its name.
        state: what ``load`` returns.
        place: higher than that of every checkpoint in the folder that was saved before.

    Raises:
        OSError: it could not be written; nothing is left of it, and a file of that name is as it was.
    """
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    try:
        with temporary.open("wb") as file:
            checked = _Checked(file)
            torch.save(dict(state), checked)  # type: ignore[arg-type]  # it needs write() and flush() only
            if checked.error is not None:
                raise checked.error
            head = MAGIC, checked.size, place
            checked.hash.update(_TRAILER.pack(*head, b"")[:-32])
            file.write(_TRAILER.pack(*head, checked.hash.digest()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return checked.size + _TRAILER.size


def link(path: Path, name: Path) -> None:
    """Give the file a second name, atomically; where a file system has no links, a copy."""
    temporary = name.with_name(_TEMPORARY.format(name=name.name))
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        with path.open("rb") as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
            target.flush()
            os.fsync(target.fileno())
    temporary.replace(name)
    # Replacing one name of a file by another name of the same file leaves both.
    temporary.unlink(missing_ok=True)
    _sync_folder(name.parent)


def clear_unfinished(folder: Path) -> None:
    """Delete what saves that were interrupted have left in a folder."""
    for left in folder.glob(_TEMPORARY.format(name="*.pt")):
        left.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in the folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_of(path: Path) -> int:
    """Return a checkpoint's place in its folder's order: one that was saved later has a higher one.

    It is a counter. The clock may be set back between two saves; files of earlier versions, whose place is the time
    of writing in Unix nanoseconds, are counted on from.

    Raises:
        CheckpointError: the file is torn or no checkpoint of ours.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _trailer(path, file)[2]


def is_ours(path: Path) -> bool:
    """Return whether a file ends as a checkpoint of ours does; its checksum is not looked at."""
    try:
        place_of(path)
    except (CheckpointError, OSError):
        return False
    return True


def check(path: Path, file: BinaryIO) -> None:
    """Read all of a checkpoint and compare its checksum.

    Raises:
        CheckpointError: it is torn, altered or no checkpoint of ours.
    """
    magic, payload, place, digest = _trailer(path, file)
    found = hashlib.blake2b(digest_size=32)
    file.seek(0)
    left = payload
    while left and (chunk := file.read(min(_CHUNK, left))):
        found.update(chunk)
        left -= len(chunk)
    found.update(_TRAILER.pack(magic, payload, place, b"")[:-32])
    if found.digest() != digest:
        raise CheckpointError(f"{path}: is damaged: its checksum does not match")


def _trailer(path: Path, file: BinaryIO) -> tuple[bytes, int, int, bytes]:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise CheckpointError(f"{path}: is empty")
    file.seek(max(size - _TRAILER.size, 0))
    tail = file.read(_TRAILER.size)
    if len(tail) == _TRAILER.size and tail.startswith(MAGIC):
        magic, payload, place, digest = _TRAILER.unpack(tail)
        if payload + _TRAILER.size == size:
            return magic, payload, place, digest
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(f"{path}: is not a checkpoint")
    raise CheckpointError(f"{path}: is torn, or a checkpoint of another program: its checksum is missing")
