"""Times at which the lines of a log were written, from the file's sizes at known times; pure, of bounded memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from operator import itemgetter

MIN_TIMES = 256
"""Number of known times that each rank may have at least."""


class LogTimes:
    """Sizes of one log file and the times at which they were first known."""

    def __init__(self, ranks: int = 1, *, whole: bool = True) -> None:
        """Note no time yet; ``whole``: whether they are noted from the run's start, else the lines before have none."""
        # Maximum number of known times of all ranks together: 8 MiB, 8 minutes of 1,024 ranks that print in every
        # second.
        times = 1 << 19
        self._most = max(times // max(ranks, 1), MIN_TIMES)
        self._sizes = array("q")
        self._times = array("d")
        self._whole = whole
        self._forgotten = 0
        """Size up to which times are forgotten."""

    @property
    def last(self) -> int:
        return self._sizes[-1] if self._sizes else self._forgotten

    def note(self, size: int, time: float) -> None:
        """Note the file's size at a time, Unix seconds."""
        if size <= self.last:
            return
        if not self._sizes and not self._whole:
            self._forgotten = size
        self._sizes.append(size)
        self._times.append(time)
        if len(self._sizes) > self._most:
            half = self._most // 2
            self._forgotten = self._sizes[half - 1]
            del self._sizes[:half], self._times[:half]

    def between(self, begin: int, end: int) -> Iterator[tuple[int, float]]:
        """Yield the known sizes between two, each with its time, ascending."""
        for index in range(bisect_right(self._sizes, begin), bisect_right(self._sizes, end)):
            yield self._sizes[index], self._times[index]

    def at(self, end: int) -> float | None:
        """Return the first known time at which the file had ``end`` bytes, Unix seconds; None where not known."""
        if end <= self._forgotten:
            return None
        index = bisect_left(self._sizes, end)
        return self._times[index] if index < len(self._times) else None


Part = tuple[str, bytes, int]
"""Name of a log, some of its bytes, and their offset in the file."""


def in_order(parts: Iterable[Part], times: Mapping[str, LogTimes]) -> Iterator[Part]:
    """Yield parts of several logs cut at line ends in the order of their times.

    Logs without known times come first: the supervisor writes at the start. So do lines whose times are forgotten;
    lines that are newer than the last known time come last.
    """
    timed: list[tuple[float, Part]] = []
    for name, data, begin in parts:
        start, end = 0, begin + len(data)
        known = times.get(name)
        for size, time in known.between(begin, end) if known is not None else ():
            cut = data.rfind(b"\n", start, size - begin) + 1
            if cut > start:
                timed.append((time, (name, data[start:cut], begin + start)))
                start = cut
        last = None if known is None else known.at(end)
        if last is None:
            last = inf if known is not None and end > known.last else -inf
        timed.append((last, (name, data[start:], begin + start)))
    for _, part in sorted(timed, key=itemgetter(0)):
        if part[1]:
            yield part
