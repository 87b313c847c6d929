"""Format of a checkpoint file: written atomically, and verified by a checksum.

The file is the zip archive of ``torch.save``, which ``torch.load(path, weights_only=True)`` reads, followed by a
trailer with a checksum and the run that the file belongs to. A file gets its name only when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.contract.checkpoint_trailer import DIGEST_BYTES, Trailer, head_of, owner_of, read_trailer, trailer_of
from trainer.contract.errors import CheckpointError
from trainer.contract.record.run_dir import replacing

EPOCH = "epoch_{}.pt"
"""Name of the checkpoint at the end of an epoch, if those are kept: a second name of its step's file."""

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
        self.hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
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

    def flush(self) -> None:  # the file is flushed and synced once, at the end
        pass


def step_name(step: int) -> str:
    """Return the file name of a step's checkpoint."""
    return f"step_{step:08d}.pt"


def write_file(path: Path, state: Mapping[str, Any], *, sequence: int = 0, run: str = "") -> int:
    """Write a checkpoint under a temporary name, sync it and rename it; return its size in bytes.

    Raises:
        OSError: the file could not be written; nothing of it remains, and an existing file at ``path`` is unchanged.
    """
    with _replacing(path) as file:
        hashing = _HashingFile(file)
        torch.save(dict(state), hashing)  # type: ignore[arg-type]  # it needs write() and flush() only
        if hashing.error is not None:
            raise hashing.error
        head = head_of(payload=hashing.size, sequence=sequence, run=run)
        hashing.hash.update(head)
        file.write(head + hashing.hash.digest())
    return hashing.size + len(head) + DIGEST_BYTES


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield the file that becomes ``path``; on any failure nothing of it remains."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    with replacing(path, temporary) as file:
        yield file
    _sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(_TEMPORARY.format(name=path.name))


def link(path: Path, name: Path) -> None:
    """Give the file a second name, atomically; copy it if the file system has no hard links."""
    temporary = _temporary(name)
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        with path.open("rb") as source, _replacing(name) as target:
            shutil.copyfileobj(source, target, _CHUNK)
        return
    temporary.replace(name)
    # rename(2) does nothing if both names are links to one file.
    temporary.unlink(missing_ok=True)
    _sync_folder(name.parent)


def copy_for(run: str, path: Path, name: Path) -> None:
    """Write a copy of a checkpoint that belongs to another run, atomically.

    Raises:
        CheckpointError: the file is torn or altered.
        OSError: it cannot be read, or the copy not written; nothing of the copy remains.
    """
    with path.open("rb") as source, _replacing(name) as target:
        trailer = check(path, source)
        checksum = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for chunk in _chunks(source, trailer.payload):
            checksum.update(chunk)
            target.write(chunk)
        head = head_of(payload=trailer.payload, sequence=trailer.sequence, run=run)
        checksum.update(head)
        target.write(head + checksum.digest())


def set_aside(path: Path, *, run: str) -> Path:
    """Rename a file whose name this run is about to use, if it belongs to another run; return its name now."""
    if not path.is_file() or (owner := owner_of(path)) == run:
        return path
    suffix = hashlib.blake2b(owner.encode(errors="surrogateescape"), digest_size=4).hexdigest()
    return path.rename(path.with_name(f"{path.name.partition('.')[0]}.of-{suffix}.pt"))


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
    """Return a checkpoint's sequence number in its folder; a later save has a higher one."""
    with path.open("rb") as file:
        return read_trailer(path, file).sequence


def has_trailer(path: Path) -> bool:
    """Return whether a file ends with the trailer of a checkpoint; the checksum is not verified."""
    return trailer_of(path) is not None


def check(path: Path, file: BinaryIO) -> Trailer:
    """Read all of a checkpoint and verify its checksum; return its trailer."""
    trailer = read_trailer(path, file)
    checksum = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for chunk in _chunks(file, trailer.payload):
        checksum.update(chunk)
    checksum.update(trailer.head)
    if checksum.digest() != trailer.digest:
        raise CheckpointError(f"{path}: is damaged: its checksum does not match")
    return trailer


def _chunks(file: BinaryIO, count: int) -> Iterator[bytes]:
    file.seek(0)
    while count and (chunk := file.read(min(_CHUNK, count))):
        yield chunk
        count -= len(chunk)
