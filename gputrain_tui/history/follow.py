"""Reads files that somebody else appends to: whole lines only, each once, many files at little cost per look."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.contract.record.regular_file import open_regular, size_of

SHORTEST_TAIL_BYTES = 16_384
"""What of a file is read at least where only the last bytes are wanted."""
LONGEST_LINE_BYTES = 1 << 20
"""What is kept of a line until its end has come; a longer one is given in pieces, which are no events."""


class AppendedFile:
    """One file that grows: gives whole lines, keeps a torn last one until the rest has come.

    What is no regular file, or cannot be opened, has nothing to read.
    """

    def __init__(
        self, path: Path | str, *, keep_open: bool = True, longest_line_bytes: int = LONGEST_LINE_BYTES
    ) -> None:
        self.path = os.fspath(path)
        self._longest_line_bytes = longest_line_bytes
        self.offset = 0
        """Bytes read so far."""
        self._rest = b""
        self._keep_open = keep_open
        self._fd: int | None = None

    def unread(self) -> int:
        """Bytes that were appended and not read yet; 0 while there is no such file."""
        if self._fd is None and not self._keep_open:
            return size_of(self.path) - self.offset
        try:
            # Seeking costs a tenth of a stat by name, which counts with a thousand files ten times a second.
            return os.lseek(self._open(), 0, os.SEEK_END) - self.offset
        except OSError:
            return 0

    def lines(self, limit_bytes: int) -> bytes:
        """Read at most so many bytes on; return the lines that are complete by now."""
        data = self.chunk(limit_bytes)
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._rest += data
            return self.remainder() if len(self._rest) > self._longest_line_bytes else b""
        whole = self._rest + data[:cut]
        self._rest = data[cut:]
        return whole

    def chunk(self, limit_bytes: int) -> bytes:
        """Read at most so many bytes on, whether or not a line ends there: for who shows lines that still grow."""
        data = os.pread(self._open(), limit_bytes, self.offset)
        if not self._keep_open:
            self.close()
        self.offset += len(data)
        return data

    def skip(self, last_bytes: int) -> None:
        """Go on near the end: with the first line that begins in the last so many bytes."""
        unread = self.unread()
        if unread <= last_bytes:
            return
        self.offset += unread - last_bytes
        start = self.offset
        with suppress(OSError):
            head = self.chunk(min(last_bytes, 65_536))
            self.offset = start + head.find(b"\n") + 1

    def remainder(self) -> bytes:
        """The torn last line, given out for good: for a file that nobody writes any more."""
        rest, self._rest = self._rest, b""
        return rest

    def close(self) -> None:
        """Let go of the file; a later call opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = open_regular(self.path)
        return self._fd


class Follower:
    """All growing files of one folder, also those that appear later, read in fair shares."""

    share_bytes = 2048
    """What a file with a backlog may read in one poll, however many others wait."""
    rescan_s = 5.0
    """A folder is listed again at least this often: a remote file system may show an old change time."""
    settle_s = 0.1
    """A folder that changed this shortly before it was listed may have changed again within the clock's grain."""

    def __init__(
        self,
        folder: Path,
        suffix: str,
        *,
        only: Container[str] | None = None,
        torn: bool = False,
        longest_line_bytes: int = LONGEST_LINE_BYTES,
        last_bytes: int | None = None,
        begin: Mapping[str, int] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Follow a folder.

        Args:
            folder: it may appear later.
            suffix: of the files' names, with its dot.
            only: names without suffix; by default all.
            torn: give what is there also where a line has not ended yet.
            longest_line_bytes: what is kept of a line until its end has come.
            last_bytes: begin so near the end, all files together; by default at the beginning.
            begin: bytes at which to begin, by name without suffix.
            now: Unix seconds.
        """
        self._folder = os.fspath(folder)
        self._only = only
        self._suffix = suffix
        self._torn = torn
        self._longest_line_bytes = longest_line_bytes
        self._last_bytes = last_bytes
        self._begin = begin or {}
        self._now = now
        self._files: dict[str, AppendedFile] = {}
        self._listed_at = float("-inf")
        self._changed = 0
        # Half of what this process may open; files beyond that are opened for each read.
        self._may_keep = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self.backlog_bytes = 0
        """Bytes that the last poll left for the next."""

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
            except OSError:  # gone, or a disk that refuses: asked again at the next poll
                continue
            self.backlog_bytes += max(0, size - share)
            if lines:
                yield name, lines

    def remainders(self) -> Iterator[tuple[str, bytes]]:
        """Yield the torn last lines; for files that nobody writes any more."""
        for name, file in self._files.items():
            rest = file.remainder()
            if rest:
                yield name, rest

    def close(self) -> None:
        """Let go of all files."""
        for file in self._files.values():
            file.close()

    def _list(self) -> None:
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116 - once per poll, also when idle
        except OSError:
            return
        now = self._now()
        settled = changed == self._changed and self._listed_at - changed / 1e9 > self.settle_s
        if settled and now - self._listed_at < self.rescan_s:
            return
        self._changed, self._listed_at = changed, now
        try:
            with os.scandir(self._folder) as entries:
                found = [entry.name for entry in entries if entry.name.endswith(self._suffix)]
        except OSError:  # it is no folder, or may not be read
            return
        known = self._files
        for name in sorted(found, key=by_rank):
            stem = name[: -len(self._suffix)]
            if stem not in known and (self._only is None or stem in self._only):
                known[stem] = AppendedFile(
                    f"{self._folder}/{name}",
                    keep_open=len(known) < self._may_keep,
                    longest_line_bytes=self._longest_line_bytes,
                )
                known[stem].offset = self._begin.get(stem, 0)
                if self._last_bytes is not None:
                    known[stem].skip(max(SHORTEST_TAIL_BYTES, self._last_bytes // len(found)))


def by_rank(name: str) -> tuple[bool, int, str]:
    """Sort key: the run's file, so that its end is never seen before the ranks' log tail; then ranks by number."""
    stem = name.partition(".")[0]
    return stem != "run", int(stem) if stem.isdecimal() and len(stem) < 10 else -1, name
