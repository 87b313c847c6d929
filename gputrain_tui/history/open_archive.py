"""Unpacks the archive of a run, also one from an untrusted source, into a private temporary folder.

Only regular files with a known place in a run directory are unpacked: an archive cannot choose a path, create a link,
or exhaust disk and memory. ``tarfile.open`` would read long names and extended headers whole into memory, so that only
``tarfile``'s parser of a header is used, one header at a time.
"""

from __future__ import annotations

import atexit
import gzip
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import BinaryIO

from trainer.contract.errors import RequestError, quoted
from trainer.contract.record.regular_file import open_regular

TOP_FILES = ("recipe.toml", "plan.json", "status.json", "slurm.json", "notes.json")
FOLDERS = ("events", "logs", "nodes", "digest")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII)
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,90}", re.ASCII)
"""Name of the archive's only folder; the USTAR format has 155 bytes for folders."""
MAX_FILES = 1 << 18
"""Maximum number of files: the largest run has four per rank."""


def is_file_of_run(path: str) -> bool:
    """Whether a path below the run directory is one that an archive may hold."""
    folder, _, name = path.rpartition("/")
    if not folder:
        return name in TOP_FILES
    return folder in FOLDERS and FILE_NAME.fullmatch(name) is not None


MIN_REFUSED_BYTES = 1 << 30
"""Unpacked size up to which no ratio of compression is refused."""
MAX_RATIO = 200
"""Unpacked bytes per compressed byte above that size: records and logs have 5 to 30, a bomb of zeros 1000."""
COPY_BYTES = 1 << 20
"""Read at once; also more than the zeros at the end of an archive: tar writes 10 KiB, or a block of a chosen size."""
GZIP_MAGIC = b"\x1f\x8b"


class _RefusedError(Exception):
    """Reason not to unpack an archive; the message puts it after the archive's name."""


def unpack(archive: Path) -> Path:
    """Unpack an archive; return the run directory, which is deleted when this process ends.

    Raises:
        RequestError: it is no archive of a run, or cannot be read or unpacked.
    """
    try:
        descriptor = open_regular(archive)
    except OSError as error:
        raise RequestError(f"{archive} cannot be read: {error.strerror}") from None
    folder = Path(tempfile.mkdtemp(prefix="gputrain-archive-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with os.fdopen(descriptor, "rb") as file:
            return _Unpacking(folder, os.fstat(descriptor).st_size).unpack(file)
    except (_RefusedError, EOFError, zlib.error, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RequestError(f"{archive} {_problem(error)}") from None


def _problem(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return f"is not an archive of a run: {error}"
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return f"cannot be unpacked in {tempfile.gettempdir()}: {error.strerror}"
    return "is damaged: it cannot be unpacked completely"


class _Unpacking:
    """The unpacking of one archive."""

    def __init__(self, folder: Path, compressed_bytes: int) -> None:
        self._folder = folder
        free = shutil.disk_usage(folder).free
        self._limit_bytes = min(max(MIN_REFUSED_BYTES, MAX_RATIO * compressed_bytes), free)
        self._full = self._limit_bytes == free
        self._bytes = 0
        self._names: set[str] = set()
        self._top = ""

    def unpack(self, file: BinaryIO) -> Path:
        if file.read(2) != GZIP_MAGIC:
            raise _RefusedError("it is not compressed with gzip")
        file.seek(0)
        with gzip.GzipFile(fileobj=file, mode="rb") as stream:
            while (header := self._header(stream)) is not None:
                self._member(header, stream)
            rest = stream.read(COPY_BYTES)  # to the end, where the checksum is compared
            if rest.strip(b"\0") or len(rest) == COPY_BYTES:
                raise _RefusedError("data follows its end")
        if "recipe.toml" not in self._names:
            raise _RefusedError("it has no recipe.toml" if self._names else "it is empty")
        return self._folder / self._top

    def _header(self, stream: gzip.GzipFile) -> tarfile.TarInfo | None:
        block = stream.read(tarfile.BLOCKSIZE)
        self._count(len(block))
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            if block and not block.strip(b"\0") and self._names:
                return None
            raise _RefusedError("its content is not a tar archive, or is cut off") from None

    def _member(self, header: tarfile.TarInfo, stream: gzip.GzipFile) -> None:
        name = quoted(header.name)
        top, _, path = header.name.rstrip("/").removeprefix("./").partition("/")
        if header.name.startswith("/") or ".." in header.name.split("/"):
            raise _RefusedError(f"{name} would be unpacked outside its folder")
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            kinds = {tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a link", tarfile.FIFOTYPE: "a pipe"}
            kinds |= {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device"}
            raise _RefusedError(f"{name} is {kinds.get(header.type, 'not a regular file')}")
        self._top = self._top or top
        if top != self._top or not RUN_NAME.fullmatch(top):
            raise _RefusedError(f"{name} is not in the folder of one run")
        if header.type == tarfile.DIRTYPE:
            if path and path not in FOLDERS:
                raise _RefusedError(f"{name} is not a folder of a run")
        elif not is_file_of_run(path):
            raise _RefusedError(f"{name} is not a file of a run")
        elif path in self._names:
            raise _RefusedError(f"{name} occurs twice")
        elif header.size < 0 or len(self._names) >= MAX_FILES:
            raise _RefusedError("it has too many files" if header.size >= 0 else f"{name} has no size")
        else:
            self._names.add(path)
            self._file(self._folder / self._top / path, header, stream)

    def _file(self, path: Path, header: tarfile.TarInfo, stream: gzip.GzipFile) -> None:
        self._count(header.size, ahead=True)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remaining = header.size
        with path.open("xb") as file:
            while remaining > 0:
                data = stream.read(min(remaining, COPY_BYTES))
                if not data:
                    raise EOFError
                self._count(len(data))
                remaining -= len(data)
                file.write(data)
        os.utime(path, (header.mtime, header.mtime))
        self._count(len(stream.read(-header.size % tarfile.BLOCKSIZE)))

    def _count(self, count: int, *, ahead: bool = False) -> None:
        """Add to the unpacked bytes, or only check a size from a header (``ahead``); raise above the limit."""
        if self._bytes + count > self._limit_bytes:
            space = f"than {self._folder.parent} has room for" if self._full else f"than {MAX_RATIO} times its size"
            raise _RefusedError(f"it unpacks to more {space}")
        self._bytes += 0 if ahead else count
