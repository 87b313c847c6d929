"""The newest lines of many logs in bounded memory, kept as the bytes that were written.

A view decodes only the lines that it shows; here a line costs a slice of its bytes. Line numbers only grow, so that a
view keeps its position while old lines are dropped.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable
from enum import IntEnum
from typing import NamedTuple

MAX_LINE_BYTES = 4096
"""Bytes kept of a line: a megabyte without a newline is output by mistake."""

ERRORS = re.compile(
    rb"\bERROR\b|\b[Ee]rror:|\w(?:Error|Exception)\b|\b(?:FATAL|CRITICAL)\b|Traceback \(most recent"
    rb"|\[E\d{4} |\[error\]|level=error|Segmentation fault|\bcore dumped\b"
)
WARNINGS = re.compile(rb"\bWARN(?:ING)?\b|\b[Ww]arning:|\w(?:Warning)\b|\[W\d{4} |\[warn(?:ing)?\]|level=warn")
RANK_PREFIX = re.compile(rb"\[(?:rank ?)?\d+\]:? ?")
"""Prefix that torch puts before each line of a traceback."""


class Level(IntEnum):
    """Severity of a line, by its text."""

    ALL = 0
    WARNING = 1
    ERROR = 2


class LogLine(NamedTuple):
    """One line as it was written."""

    name: str
    """Name of its file without suffix: the rank, or ``node-0``."""
    raw: bytes
    """Without newline; of a line that was overwritten in place only the last version."""
    cut_bytes: int
    end: int = 0
    """Offset of its end in its file, bytes; 0 where not known."""


def level_of(raw: bytes) -> Level:
    """Return the level of a single line."""
    if ERRORS.search(raw):
        return Level.ERROR
    return Level.WARNING if WARNINGS.search(raw) else Level.ALL


def newest_version(raw: bytes, *, ended: bool = True) -> bytes:
    """Return the visible text of a line that was overwritten with carriage returns, such as a progress bar.

    A carriage return at the end of a line that is not ended stays: the next byte overwrites the line.
    """
    if b"\r" not in raw:
        return raw
    text = raw.rstrip(b"\r")
    start = text.rfind(b"\r") + 1
    return text[start:] if ended or len(text) == len(raw) else text[start:] + b"\r"


def _clipped(line: bytes) -> tuple[bytes, int]:
    end = b"\r" if line.endswith(b"\r") else b""
    kept = line[: MAX_LINE_BYTES - len(end)] + end
    return kept, len(line) - len(kept)


class LogBuffer:
    """The newest lines of all files; those of at least ``level`` are visible. ``version`` grows with every change."""

    def __init__(self, *, lines: int = 50_000, size_bytes: int = 16 << 20) -> None:
        """Keep at most so many lines and bytes."""
        self.version = 0
        self.level = Level.ALL
        self.names: set[str] = set()
        """Files that have any output."""
        self._most_lines, self._most_bytes = lines, size_bytes
        self._lines: list[bytes] = []
        self._names: list[str] = []
        self._ends = array("q")
        """Per line the offset of its end in its file, bytes."""
        self._first = 0
        self._bytes = 0
        self._unfinished: dict[str, int] = {}
        """Number of the unfinished last line of a file, by file."""
        self._cut_bytes: dict[int, int] = {}
        self._visible: list[int] = []
        """Numbers of the visible lines; unused for ALL."""
        self._in_traceback: set[str] = set()

    def feed(self, name: str, data: bytes, *, begin: int = 0) -> None:
        """Add bytes that were appended to a file from ``begin`` on; the last line may be unfinished."""
        parts = data.split(b"\n")
        self.names.add(name)
        number = self._unfinished.pop(name, -1)
        if number >= self._first:
            rest = parts.pop(0)
            self._continue_line(number, rest, ended=bool(parts))
            begin += len(rest) + bool(parts)
            self._ends[number - self._first] = begin
            if not parts:
                self._unfinished[name] = number
        if parts:
            torn = parts.pop()
            begin = self._append_lines(name, parts, begin)
            if torn:
                self._unfinished[name] = self._first + len(self._lines)
                self._append_lines(name, [torn], begin, ended=False)
        self._trim()
        self.version += 1

    def set_level(self, level: Level) -> None:
        self.level = level
        self._visible = []
        self._in_traceback.clear()
        if level is not Level.ALL:
            numbers = range(self._first, self._first + len(self._lines))
            unended = set(self._unfinished.values())
            self._index_lines(number for number in numbers if number not in unended)
        self.version += 1

    @property
    def rows(self) -> int:
        return len(self._lines) if self.level is Level.ALL else len(self._visible)

    def number(self, row: int) -> int:
        return self._first + row if self.level is Level.ALL else self._visible[row]

    def row(self, number: int) -> int:
        """Return the row of a line; of the next visible one where it is hidden or dropped."""
        if self.level is Level.ALL:
            return min(max(number - self._first, 0), len(self._lines))
        return bisect_left(self._visible, number)

    def line(self, number: int) -> LogLine:
        index = number - self._first
        return LogLine(
            self._names[index], self._lines[index].rstrip(b"\r"), self._cut_bytes.get(number, 0), self._ends[index]
        )

    def find(self, text: str, row: int, *, forward: bool) -> int | None:
        """Return the next row after or before ``row`` that contains a text, ignoring case and wrapping around."""
        part = text.encode("utf-8", "surrogateescape").lower()
        return self._next(row, lambda index: part in self._lines[index].lower(), 1 if forward else -1) if part else None

    def find_of(self, names: Container[str], row: int) -> int | None:
        """Return the next row after ``row`` with a line of one of the files ``names``, wrapping around."""
        return self._next(row, lambda index: self._names[index] in names)

    def _next(self, row: int, matches: Callable[[int], bool], step: int = 1) -> int | None:
        count = self.rows
        rows = ((row + step * distance) % count for distance in range(1, count + 1))
        return next((at for at in rows if matches(self.number(at) - self._first)), None)

    def _append_lines(self, name: str, lines: list[bytes], begin: int, *, ended: bool = True) -> int:
        """Append lines of a file from the offset ``begin`` on; return the offset of their end."""
        number = self._first + len(self._lines)
        for line in lines:
            begin += len(line) + ended
            self._ends.append(begin)
            if b"\r" in line:
                line = newest_version(line, ended=ended)
            if len(line) > MAX_LINE_BYTES:
                line, self._cut_bytes[number] = _clipped(line)
            self._lines.append(line)
            self._bytes += len(line)
            number += 1
        self._names.extend([name] * len(lines))
        if ended and self.level is not Level.ALL:
            self._index_lines(range(number - len(lines), number))
        return begin

    def _continue_line(self, number: int, data: bytes, *, ended: bool) -> None:
        index = number - self._first
        before, more = self._lines[index], self._cut_bytes.pop(number, 0)
        if more and b"\r" not in data and not before.endswith(b"\r"):
            self._cut_bytes[number] = more + len(data)
        else:
            line = newest_version(before + data, ended=ended)
            if len(line) > MAX_LINE_BYTES:
                line, self._cut_bytes[number] = _clipped(line)
            self._lines[index] = line
            self._bytes += len(line) - len(before)
        if ended and self.level is not Level.ALL:
            self._index_lines([number])

    def _index_lines(self, numbers: Iterable[int]) -> None:
        """Add lines of at least ``level`` to the visible ones; all lines of a traceback are errors."""
        for number in numbers:
            name, raw = self._names[number - self._first], self._lines[number - self._first]
            level = level_of(raw)
            if name in self._in_traceback:
                level = Level.ERROR
                text = RANK_PREFIX.sub(b"", raw, count=1) if raw.startswith(b"[") else raw
                if text[:1] not in (b" ", b"\t", b""):
                    self._in_traceback.discard(name)
            if b"Traceback (most recent" in raw:
                self._in_traceback.add(name)
            if level >= self.level:
                if self._visible and number < self._visible[-1]:
                    insort(self._visible, number)
                else:
                    self._visible.append(number)

    def _trim(self) -> None:
        """Drop old lines, a tenth at a time, so that it costs little per line."""
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
        del self._lines[:excess], self._names[:excess], self._ends[:excess]
        self._first += excess
        del self._visible[: bisect_left(self._visible, self._first)]
        self._cut_bytes = {number: more for number, more in self._cut_bytes.items() if number >= self._first}
