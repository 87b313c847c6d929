"""Files of a run, opened only if they are regular, without blocking, and read up to a limit.

A pipe without a writer, a device, or a link to either would block every command that reads a run. Reading follows a
link to a regular file, because a person may have moved a large log or record to another disk. Writing does not follow
links: the package creates none, so the target does not belong to the run. Folders may be links.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record.json_lines import DECODE_ERRORS

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file that is read in one piece: ten times the plan of the largest run."""

TAIL_BYTES = 1 << 20
"""Bytes at the end of an event file in which its last events of any kind are searched."""
READ_BYTES = 1 << 16
"""Bytes of one read: the buffer of a larger one costs more than reading a small file."""

T = TypeVar("T")


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file with flags of ``os.open``; return its descriptor.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    # Checked before opening, since opening a device may have an effect, and again after it, since the file may have
    # been replaced in between.
    try:
        _require_regular(os.stat(path, follow_symlinks=not writes), path)  # noqa: PTH116 - no Path per call
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    safe_flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    descriptor = os.open(path, flags | safe_flags, 0o600)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def open_to_append(path: Path | str) -> int:
    """Open or create a file for appending; return its descriptor."""
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def size_of(path: Path | str) -> int:
    """Return the size of a regular file in bytes; 0 if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - as above
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def read_whole(path: Path | str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file."""
    data = read_part(path, 0, max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", os.fspath(path))
    return data


def read_part(path: Path | str, begin: int, max_bytes: int) -> bytes:
    """Read at most ``max_bytes`` of a file from byte ``begin`` on."""
    descriptor = open_regular(path)
    try:
        os.lseek(descriptor, max(begin, 0), os.SEEK_SET)
        parts = []
        while max_bytes > 0 and (part := os.read(descriptor, min(max_bytes, READ_BYTES))):
            parts.append(part)
            max_bytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_tail(path: Path | str, max_bytes: int = TAIL_BYTES) -> bytes:
    """Read at most the last ``max_bytes`` of a file."""
    return read_part(path, size_of(path) - max_bytes, max_bytes)


def read_json(path: Path | str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a small JSON file."""
    try:
        return decoder.decode(read_whole(path))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except DECODE_ERRORS as error:
        raise RecordError(f"{path} is damaged: {str(error).partition(chr(10))[0]}") from None


class OwnedDescriptor:
    """File descriptor that detects whether a script has closed it and reused its number.

    Writing to a reused number would write into one of the script's files.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = _identity(fd)

    @property
    def is_unchanged(self) -> bool:
        try:
            return _identity(self.fd) == self._file
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor, unless its number was closed or reused."""
        if self.is_unchanged:
            os.close(self.fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
