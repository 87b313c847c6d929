"""The newest lines of many logs in bounded memory, kept as the bytes that were written.

A view decodes only the lines that it shows; here a line costs a slice of its bytes. Numbers of lines only grow, so that
a view can stay where it is while old lines fall off.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

LINE_BYTES = 4096
"""What is kept of a line: a megabyte without a newline is a mistake, not something to read."""

ERRORS = re.compile(
    rb"\bERROR\b|\b[Ee]rror:|\w(?:Error|Exception)\b|\b(?:FATAL|CRITICAL)\b|Traceback \(most recent"
    rb"|\[E\d{4} |\[error\]|level=error|Segmentation fault|\bcore dumped\b"
)
WARNINGS = re.compile(rb"\bWARN(?:ING)?\b|\b[Ww]arning:|\w(?:Warning)\b|\[W\d{4} |\[warn(?:ing)?\]|level=warn")
RANK_PREFIX = re.compile(rb"\[(?:rank ?)?\d+\]:? ?")
"""What torch puts before the lines of a traceback."""


class Level(IntEnum):
    """How much a line matters, by its text."""

    ALL = 0
    WARNING = 1
    ERROR = 2


class LogLine(NamedTuple):
    """One line as it was written."""

    name: str
    """Of its file, without suffix: the rank, or ``node-0``."""
    raw: bytes
    """Without newline, and only the last version of what was overwritten in place."""
    more: int
    """Bytes that are not kept."""


def level_of(raw: bytes) -> Level:
    """Return the level of a line alone."""
    if ERRORS.search(raw):
        return Level.ERROR
    return Level.WARNING if WARNINGS.search(raw) else Level.ALL


def newest_version(raw: bytes, *, ended: bool = True) -> bytes:
    """Return what a terminal shows of a line that was overwritten with carriage returns, as progress bars are.

    A carriage return at the end of a line that is not ended stays: the next byte overwrites the line.
    """
    if b"\r" not in raw:
        return raw
    text = raw.rstrip(b"\r")
    start = text.rfind(b"\r") + 1
    return text[start:] if ended or len(text) == len(raw) else text[start:] + b"\r"


def _clipped(line: bytes) -> tuple[bytes, int]:
    """Return what is kept of a long line, and how many bytes are not."""
    end = b"\r" if line.endswith(b"\r") else b""
    kept = line[: LINE_BYTES - len(end)] + end
    return kept, len(line) - len(kept)


class LogBuffer:
    """A ring of lines, of which those from a level on are seen. ``version`` moves with every change."""

    def __init__(self, *, lines: int = 50_000, size_bytes: int = 16 << 20) -> None:
        """Start empty.

        Args:
            lines: how many are kept.
            size_bytes: how many bytes they may have together.
        """
        self.version = 0
        self.level = Level.ALL
        self.names: set[str] = set()
        """Files that have said something."""
        self._most_lines, self._most_bytes = lines, size_bytes
        self._lines: list[bytes] = []
        self._from: list[str] = []
        self._first = 0
        """Number of the oldest line."""
        self._bytes = 0
        self._open: dict[str, int] = {}
        """Number of the line that each file has not ended."""
        self._more: dict[int, int] = {}
        self._seen: list[int] = []
        """Numbers of the lines from ``level`` on; unused for ALL."""
        self._in_traceback: set[str] = set()

    def feed(self, name: str, data: bytes) -> None:
        """Take in what was appended to a file; its last line may go on in the next piece."""
        parts = data.split(b"\n")
        self.names.add(name)
        number = self._open.pop(name, -1)
        if number >= self._first:
            self._continue(number, parts.pop(0), ended=bool(parts))
            if not parts:
                self._open[name] = number
        if parts:
            torn = parts.pop()
            self._extend(name, parts)
            if torn:
                self._open[name] = self._first + len(self._lines)
                self._extend(name, [torn], ended=False)
        self._trim()
        self.version += 1

    def show(self, level: Level) -> None:
        """Choose from which level on lines are seen."""
        self.level = level
        self._seen = []
        self._in_traceback.clear()
        if level is not Level.ALL:
            numbers = range(self._first, self._first + len(self._lines))
            unended = set(self._open.values())
            self._note(number for number in numbers if number not in unended)
        self.version += 1

    @property
    def rows(self) -> int:
        """How many lines are seen."""
        return len(self._lines) if self.level is Level.ALL else len(self._seen)

    def number(self, row: int) -> int:
        """Return the number of the line that is seen in a row."""
        return self._first + row if self.level is Level.ALL else self._seen[row]

    def row(self, number: int) -> int:
        """Return the row of a line; of the next that is seen where it is not, or has fallen off."""
        if self.level is Level.ALL:
            return min(max(number - self._first, 0), len(self._lines))
        return bisect_left(self._seen, number)

    def line(self, number: int) -> LogLine:
        """Return a line by its number."""
        index = number - self._first
        return LogLine(self._from[index], self._lines[index].rstrip(b"\r"), self._more.get(number, 0))

    def find(self, text: str, row: int, *, forward: bool) -> int | None:
        """Return the next row that holds a text, whatever its case, after one row or before it, and around the end."""
        needle = text.encode("utf-8", "surrogateescape").lower()
        count = self.rows
        if not needle or not count:
            return None
        step = 1 if forward else -1
        for distance in range(1, count + 1):
            at = (row + step * distance) % count
            if needle in self._lines[self.number(at) - self._first].lower():
                return at
        return None

    def _extend(self, name: str, lines: list[bytes], *, ended: bool = True) -> None:
        """Add lines of a file below all others."""
        number = self._first + len(self._lines)
        for line in lines:
            if b"\r" in line:
                line = newest_version(line, ended=ended)
            if len(line) > LINE_BYTES:
                line, self._more[number] = _clipped(line)
            self._lines.append(line)
            self._bytes += len(line)
            number += 1
        self._from.extend([name] * len(lines))
        if ended and self.level is not Level.ALL:
            self._note(range(number - len(lines), number))

    def _continue(self, number: int, data: bytes, *, ended: bool) -> None:
        """Let the unended line of a file go on."""
        index = number - self._first
        before, more = self._lines[index], self._more.pop(number, 0)
        if more and b"\r" not in data and not before.endswith(b"\r"):
            self._more[number] = more + len(data)
        else:
            line = newest_version(before + data, ended=ended)
            if len(line) > LINE_BYTES:
                line, self._more[number] = _clipped(line)
            self._lines[index] = line
            self._bytes += len(line) - len(before)
        if ended and self.level is not Level.ALL:
            self._note([number])

    def _note(self, numbers: Iterable[int]) -> None:
        """See the lines that matter; the lines of a traceback matter with its last one."""
        for number in numbers:
            name, raw = self._from[number - self._first], self._lines[number - self._first]
            level = level_of(raw)
            if name in self._in_traceback:
                level = Level.ERROR
                text = RANK_PREFIX.sub(b"", raw, count=1) if raw.startswith(b"[") else raw
                if text[:1] not in (b" ", b"\t", b""):
                    self._in_traceback.discard(name)
            if b"Traceback (most recent" in raw:
                self._in_traceback.add(name)
            if level >= self.level:
                if self._seen and number < self._seen[-1]:
                    insort(self._seen, number)
                else:
                    self._seen.append(number)

    def _trim(self) -> None:
        """Let old lines fall off, a tenth at a time, so that it costs little per line."""
        excess = 0
        if len(self._lines) > self._most_lines + self._most_lines // 10:
            excess = len(self._lines) - self._most_lines
        if self._bytes > self._most_bytes + self._most_bytes // 10:
            size, count = self._bytes, 0
            while size > self._most_bytes:
                size -= len(self._lines[count])
                count += 1
            excess = max(excess, count)
        if not excess:
            return
        self._bytes -= sum(map(len, self._lines[:excess]))
        del self._lines[:excess], self._from[:excess]
        self._first += excess
        del self._seen[: bisect_left(self._seen, self._first)]
        self._more = {number: more for number, more in self._more.items() if number >= self._first}
