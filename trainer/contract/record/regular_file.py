"""Opens the files of a run directory: regular files only, without waiting, and no more of them than fits.

A pipe without a writer, a device, or a link to either would hold up every command that reads a run. To read, a link to
a regular file is followed, because somebody may have moved a large log or record to another disk; to write it is not,
because nothing of the package makes one, and what it names is not the run's. Folders may be links.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from trainer.contract.errors import RecordError

MOST_BYTES = 64 << 20
"""Of a file that is read whole: ten times what the plan of the largest run takes."""

T = TypeVar("T")


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a file, which must be a regular one; return its descriptor.

    Args:
        path: of the file.
        flags: as for ``os.open``.
        mode: of a file that is made.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    # Looked at before it is opened, since opening a device may already do something; and after, since it may change.
    try:
        _require_regular(Path(path).stat(follow_symlinks=not writes), path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    more = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    descriptor = os.open(path, flags | more, mode)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(found: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


def open_to_append(path: Path | str) -> int:
    """Open a file to append to it, made where there is none; return its descriptor.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def size_of(path: Path | str) -> int:
    """Return the bytes of a regular file; 0 where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - also for names, without a Path per file
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def read_whole(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read, is no regular file or longer than that.
    """
    data = read_part(path, 0, most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {most_bytes:,} bytes", os.fspath(path))
    return data


def read_part(path: Path | str, begin: int, most_bytes: int) -> bytes:
    """Read so many bytes of a file at most, from a byte on; before the beginning there is nothing.

    Raises:
        OSError: it cannot be read or is no regular file.
    """
    descriptor = open_regular(path)
    try:
        os.lseek(descriptor, max(begin, 0), os.SEEK_SET)
        parts = []
        while most_bytes > 0 and (part := os.read(descriptor, most_bytes)):
            parts.append(part)
            most_bytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_tail(path: Path | str, most_bytes: int) -> bytes:
    """Read the last bytes of a file.

    Raises:
        OSError: it cannot be read or is no regular file.
    """
    return read_part(path, size_of(path) - most_bytes, most_bytes)


def read_json(path: Path | str, decoder: msgspec.json.Decoder[T], most_bytes: int = MOST_BYTES) -> T:
    """Read what a small file holds.

    Raises:
        RecordError: it cannot be read, or holds something else.
    """
    try:
        return decoder.decode(read_whole(path, most_bytes))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {str(error).partition(chr(10))[0]}") from None
