"""Format of a checkpoint file: written atomically, and verified by a checksum.

The file is the zip archive of ``torch.save``, which ``torch.load(path, weights_only=True)`` reads, followed by a
trailer with a checksum. A file gets its name only when all of it is on disk.
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
"""Name of the best checkpoint so far: a second name of its step's file."""
EPOCH = "epoch_{}.pt"
"""Name of the checkpoint at the end of an epoch, if those are kept: a second name of its step's file."""

MAGIC = b"gputrain ckpt 1\n"
_TRAILER = struct.Struct("<16sQQ32s")
"""Magic, size of the payload in bytes, sequence number in the folder, BLAKE2b of everything before the hash."""
MAX_SEQUENCE = 2**64 - 1
"""Highest sequence number that a file can have."""
_CHUNK = 1 << 22
"""Bytes read at once."""
_TEMPORARY = ".{name}.tmp"


class _HashingFile:
    """File for ``torch.save`` that hashes the bytes written and stores an error instead of raising it.

    An exception inside torch's C++ writer surfaces as a different one, and the writer's destructor may abort the
    process.
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
        """Do nothing: the file is flushed and synced once, at the end."""


def step_name(step: int) -> str:
    """Return the file name of a step's checkpoint."""
    return f"step_{step:08d}.pt"


def write_file(path: Path, state: Mapping[str, Any], *, sequence: int = 0) -> int:
    """Write a checkpoint under a temporary name, sync it and rename it; return its size in bytes.

    Args:
        path: final name of the file.
        state: state that ``load`` will return.
        sequence: sequence number, higher than those of all checkpoints saved in the folder before.

    Raises:
        OSError: the file could not be written; nothing of it remains, and an existing file at ``path`` is unchanged.
    """
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    try:
        with temporary.open("wb") as file:
            hashing = _HashingFile(file)
            torch.save(dict(state), hashing)  # type: ignore[arg-type]  # it needs write() and flush() only
            if hashing.error is not None:
                raise hashing.error
            head = MAGIC, hashing.size, sequence
            hashing.hash.update(_TRAILER.pack(*head, b"")[:-32])
            file.write(_TRAILER.pack(*head, hashing.hash.digest()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return hashing.size + _TRAILER.size


def link(path: Path, name: Path) -> None:
    """Give the file a second name, atomically; copy it if the file system has no hard links."""
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
    # rename(2) does nothing if both names are links to one file.
    temporary.unlink(missing_ok=True)
    _sync_folder(name.parent)


def clear_unfinished(folder: Path) -> None:
    """Delete the temporary files of interrupted saves in a folder."""
    for left in folder.glob(_TEMPORARY.format(name="*.pt")):
        left.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that its file names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sequence_of(path: Path) -> int:
    """Return a checkpoint's sequence number in its folder; a later save has a higher one.

    It is a counter and no time, because the clock may be set back between two saves. Files of earlier versions have
    the time of writing in Unix nanoseconds, from which the counter continues.

    Raises:
        CheckpointError: the file is torn or not a checkpoint of this package.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _trailer(path, file)[2]


def has_trailer(path: Path) -> bool:
    """Return whether a file ends with the trailer of a checkpoint; the checksum is not verified."""
    try:
        sequence_of(path)
    except (CheckpointError, OSError):
        return False
    return True


def check(path: Path, file: BinaryIO) -> None:
    """Read all of a checkpoint and verify its checksum.

    Raises:
        CheckpointError: the file is torn, altered or not a checkpoint of this package.
    """
    magic, payload, sequence, digest = _trailer(path, file)
    found = hashlib.blake2b(digest_size=32)
    file.seek(0)
    left = payload
    while left and (chunk := file.read(min(_CHUNK, left))):
        found.update(chunk)
        left -= len(chunk)
    found.update(_TRAILER.pack(magic, payload, sequence, b"")[:-32])
    if found.digest() != digest:
        raise CheckpointError(f"{path}: is damaged: its checksum does not match")


def _trailer(path: Path, file: BinaryIO) -> tuple[bytes, int, int, bytes]:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise CheckpointError(f"{path}: is empty")
    file.seek(max(size - _TRAILER.size, 0))
    tail = file.read(_TRAILER.size)
    if len(tail) == _TRAILER.size and tail.startswith(MAGIC):
        magic, payload, sequence, digest = _TRAILER.unpack(tail)
        if payload + _TRAILER.size == size:
            return magic, payload, sequence, digest
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(f"{path}: is not a checkpoint")
    raise CheckpointError(f"{path}: is incomplete, or was written by another program: its checksum is missing")
