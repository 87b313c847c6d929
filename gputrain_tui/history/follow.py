"""Reads files while other processes append to them: whole lines, each once, many files at little cost per poll."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.contract.record.regular_file import open_regular, size_of
from trainer.host.resource_limits import open_files

MIN_TAIL_BYTES = 16_384
"""Minimum read of each file when only the last bytes are wanted: some tens of events."""
MAX_LINE_BYTES = 1 << 20
"""Memory bound for a line without end; a longer one is returned in pieces, which are no events."""


class AppendedFile:
    """One growing file: returns whole lines and keeps a torn last line until its rest is written.

    A path that is no regular file, or cannot be opened, reads as empty.
    """

    def __init__(self, path: Path | str, *, keep_open: bool = True, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = os.fspath(path)
        self._longest_line_bytes = max_line_bytes
        self.offset = 0
        self.fault = ""
        """Why the file, which exists, could not be opened last; empty if it could."""
        self._rest = b""
        self._keep_open = keep_open
        self._fd: int | None = None

    def unread(self) -> int:
        """Return the number of appended bytes that are not read yet; 0 while there is no such file."""
        if self._fd is None and not self._keep_open:
            return size_of(self.path) - self.offset
        try:
            # Seeking costs a tenth of a stat by name: a thousand files are polled ten times a second.
            return os.lseek(self._open(), 0, os.SEEK_END) - self.offset
        except OSError as error:
            self.fault = "" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            return 0

    def lines(self, limit_bytes: int) -> bytes:
        """Read at most ``limit_bytes``; return the lines that are complete now."""
        data = self.chunk(limit_bytes)
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._rest += data
            return self.remainder() if len(self._rest) > self._longest_line_bytes else b""
        whole = self._rest + data[:cut]
        self._rest = data[cut:]
        return whole

    def chunk(self, limit_bytes: int) -> bytes:
        """Read at most ``limit_bytes``, also of an unfinished line: for a view that shows lines as they grow."""
        data = os.pread(self._open(), limit_bytes, self.offset)
        if not self._keep_open:
            self.close()
        self.offset += len(data)
        return data

    def skip(self, last_bytes: int) -> None:
        """Continue with the first line that begins within the last bytes of the file."""
        unread = self.unread()
        if unread <= last_bytes:
            return
        self.offset += unread - last_bytes
        start = self.offset
        with suppress(OSError):
            head = self.chunk(min(last_bytes, 65_536))
            self.offset = start + head.find(b"\n") + 1

    @property
    def has_torn_end(self) -> bool:
        """Whether what was read ends within a line."""
        return bool(self._rest)

    def remainder(self) -> bytes:
        """Return the torn last line: for a file that is no longer written."""
        rest, self._rest = self._rest, b""
        return rest

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = open_regular(self.path)
            self.fault = ""
        return self._fd


class Follower:
    """All growing files of a folder, also those that appear later, read in fair shares."""

    share_bytes = 2048
    """Minimum read of a file in one poll, however many files have a backlog."""
    rescan_s = 5.0
    """Maximum time between two listings: a remote file system may show an old change time."""
    settle_s = 0.1
    """A folder that changed this recently is listed again: its change time has the resolution of a kernel tick."""

    def __init__(
        self,
        folder: Path,
        suffix: str,
        *,
        only: Container[str] | None = None,
        torn: bool = False,
        max_line_bytes: int = MAX_LINE_BYTES,
        last_bytes: int | None = None,
        begin: Mapping[str, int] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Follow a folder, which may appear later.

        Args:
            folder: the folder.
            suffix: of the files' names, with its dot.
            only: names without suffix, which may become more; by default all.
            torn: whether to return unfinished lines as well.
            max_line_bytes: longest part of an unfinished line to keep.
            last_bytes: begin at most this far before the end, all files together; by default at the beginning.
            begin: bytes at which to begin, by name without suffix.
            now: Unix seconds.
        """
        self._folder = os.fspath(folder)
        self._only = only
        self._suffix = suffix
        self._torn = torn
        self._longest_line_bytes = max_line_bytes
        self._last_bytes = last_bytes
        self._begin = begin or {}
        self._now = now
        self._files: dict[str, AppendedFile] = {}
        self._left_out: list[str] = []
        """Files that ``only`` did not contain when the folder was listed last."""
        self._listed_at = float("-inf")
        self._changed = 0
        # Half of the descriptors of this process; further files are opened for each read.
        limit = open_files()
        self._max_open = sys.maxsize if limit is None else limit // 2
        self.backlog_bytes = 0

    def poll(self, budget_bytes: int) -> Iterator[tuple[str, bytes]]:
        """Yield file name (without suffix) and new whole lines (``torn``: bytes) of every file that has some."""
        self._list()
        grown = [(name, file, size) for name, file in self._files.items() if (size := file.unread()) > 0]
        self.backlog_bytes = 0
        if not grown:
            return
        share = max(self.share_bytes, budget_bytes // len(grown))
        for name, file, size in grown:
            try:
                lines = file.chunk(min(size, share)) if self._torn else file.lines(min(size, share))
            except OSError:  # deleted, or a disk error: tried again at the next poll
                continue
            self.backlog_bytes += max(0, size - share)
            if lines:
                yield name, lines

    def offset(self, name: str) -> int:
        """Return the offset in a file up to which it was read or skipped, bytes."""
        return self._files[name].offset

    def remainders(self) -> Iterator[tuple[str, bytes]]:
        for name, file in self._files.items():
            rest = file.remainder()
            if rest:
                yield name, rest

    @property
    def has_torn_end(self) -> bool:
        """Whether a file, as far as it was read, ends within a line."""
        return any(file.has_torn_end for file in self._files.values())

    @property
    def unreadable(self) -> dict[str, str]:
        """Reasons by the names of files that exist and could not be opened."""
        return {name + self._suffix: file.fault for name, file in self._files.items() if file.fault}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _list(self) -> None:
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116 - once per poll, also when idle
        except OSError:
            return
        now = self._now()
        settled = changed == self._changed and self._listed_at - changed / 1e9 > self.settle_s
        is_wider = self._only is not None and any(stem in self._only for stem in self._left_out)
        if settled and now - self._listed_at < self.rescan_s and not is_wider:
            return
        self._changed, self._listed_at = changed, now
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(self._suffix)]
        except OSError:  # it is no folder, or may not be read
            return
        known = self._files
        self._left_out = []
        for name in sorted(names, key=by_rank):
            stem = name[: -len(self._suffix)]
            if self._only is not None and stem not in self._only:
                self._left_out.append(stem)
            elif stem not in known:
                known[stem] = AppendedFile(
                    f"{self._folder}/{name}",
                    keep_open=len(known) < self._max_open,
                    max_line_bytes=self._longest_line_bytes,
                )
                known[stem].offset = self._begin.get(stem, 0)
                if self._last_bytes is not None:
                    known[stem].skip(max(MIN_TAIL_BYTES, self._last_bytes // len(names)))


def by_rank(name: str) -> tuple[bool, int, str]:
    """Sort key of file names: ``run`` first, then ranks by number, then the others."""
    stem = name.partition(".")[0]
    return stem != "run", int(stem) if stem.isdecimal() and len(stem) < 10 else -1, name
