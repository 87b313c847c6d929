"""Curves of any length in bounded memory: the newest points singly, older ones as ever wider min/max blocks.

A window is read from the finest level that covers it: its cost depends on the width, not on the run, and a spike is
never averaged away. ``RankFrames`` keeps the values of each rank likewise, with means for older steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from math import isfinite, nan
from typing import NamedTuple

FAN_OUT = 4
"""Points of a level that one point of the next covers."""
POINTS_PER_LEVEL = 8192
"""Minimum number of points kept of a level: more than four for every column of the widest chart."""


class Band(NamedTuple):
    """Minimum, middle and maximum over the ranks, at one step or over a block of steps; NaN if not measured."""

    low: float
    middle: float
    """Of a loss the run's, its mean over all samples; else the median over the ranks. Over several steps the mean."""
    high: float


NO_BAND = Band(nan, nan, nan)


class Point(NamedTuple):
    """A band and its step."""

    step: int
    band: Band


class _Level:
    """Points of one width; the oldest are forgotten."""

    __slots__ = ("high", "low", "middle", "start", "steps")

    def __init__(self) -> None:
        self.start = 0
        """Number of points dropped before the first kept one."""
        self.steps = array("q")
        self.low = array("d")
        self.middle = array("d")
        self.high = array("d")

    @property
    def count(self) -> int:
        return self.start + len(self.steps)

    def append(self, step: int, band: Band) -> None:
        self.steps.append(step)
        self.low.append(band.low)
        self.middle.append(band.middle)
        self.high.append(band.high)

    def trim(self, head: int, tail: int) -> None:
        for values in (self.steps, self.low, self.middle, self.high):
            del values[tail:]
            del values[:head]
        self.start += head

    def folded(self) -> tuple[int, Band]:
        low = [value for value in self.low[-FAN_OUT:] if value == value]
        high = [value for value in self.high[-FAN_OUT:] if value == value]
        middle = [value for value in self.middle[-FAN_OUT:] if value == value]
        step = self.steps[-min(FAN_OUT, len(self.steps))]
        return step, Band(min(low), sum(middle) / len(middle), max(high)) if low else NO_BAND

    def points(self, begin: int, end: int) -> Iterator[Point]:
        for index in range(begin, end):
            yield Point(self.steps[index], Band(self.low[index], self.middle[index], self.high[index]))


class BandPyramid:
    """The band of one metric over the steps of a run."""

    def __init__(self, kept: int = POINTS_PER_LEVEL) -> None:
        self._kept = kept
        self._levels = [_Level()]

    @property
    def first_step(self) -> int:
        """Step of the oldest point; 0 when there is none."""
        return next((level.steps[0] for level in reversed(self._levels) if level.steps), 0)

    @property
    def last_step(self) -> int:
        """Step of the newest point; 0 when there is none."""
        return self._levels[0].steps[-1] if self._levels[0].steps else self.first_step

    def append(self, step: int, band: Band) -> None:
        index = 0
        while True:
            level = self._levels[index]
            level.append(step, band)
            if len(level.steps) > 2 * self._kept:
                level.trim(self._kept, len(level.steps))
            if level.count % FAN_OUT:
                return
            step, band = level.folded()
            index += 1
            if index == len(self._levels):
                self._levels.append(_Level())

    def truncate(self, step: int) -> None:
        """Forget the points from ``step`` on, as after a restart from a checkpoint."""
        points = 0
        for exponent, level in enumerate(self._levels):
            index = bisect_left(level.steps, step)
            if index or not level.start:
                points = (level.start + index) * FAN_OUT**exponent
                break
        for exponent, level in enumerate(self._levels):
            keep = points // FAN_OUT**exponent - level.start
            level.trim(0, max(keep, 0))
            level.start += min(keep, 0)

    def points(self, first: int, last: int, most: int) -> Iterator[Point]:
        """Yield the points of the steps ``first`` to ``last`` in order, as fine as about ``most`` of them allow."""
        chosen = len(self._levels) - 1
        for index, level in enumerate(self._levels):
            covers = not level.start or (level.steps and level.steps[0] <= first)
            if covers and bisect_right(level.steps, last) - bisect_left(level.steps, first) <= most:
                chosen = index
                break
        for index in range(chosen, -1, -1):  # points newer than the last block come from finer levels
            level = self._levels[index]
            begin = bisect_left(level.steps, first)
            if index < chosen:
                begin = max(begin, self._levels[index + 1].count * FAN_OUT - level.start)
            yield from level.points(begin, bisect_right(level.steps, last))


class Frame:
    """One value per rank and metric, at one step or as the mean over a block of steps."""

    __slots__ = ("cache", "first_step", "last_step", "values")

    def __init__(self, first_step: int, last_step: int, values: tuple[array[float] | None, ...]) -> None:
        self.first_step = first_step
        self.last_step = last_step
        self.values = values
        """Per metric the ranks' values, NaN where one was not measured; None where none was."""
        self.cache: tuple[object, list[float]] | None = None
        """A view's last result for this frame, with its key; frames never change."""


class RankFrames:
    """Values of every rank over the steps of a run, coarser for older steps."""

    def __init__(self, metrics: int) -> None:
        self._metrics = metrics
        self._levels: list[deque[Frame]] = [deque()]
        self._pending = [0]
        """Per level, the number of newest frames that are not yet merged into the next level."""

    @property
    def newest(self) -> Frame | None:
        return self._levels[0][-1] if self._levels[0] else None

    def append(self, frame: Frame) -> None:
        ranks = max((len(values) for values in frame.values if values is not None), default=1)
        frame_values_per_level = 1 << 18  # memory bound of one metric: frames × ranks
        kept = min(max(frame_values_per_level // ranks, 64), POINTS_PER_LEVEL // 2)
        index = 0
        while True:
            level = self._levels[index]
            level.append(frame)
            if len(level) > kept:
                level.popleft()
            self._pending[index] += 1
            if self._pending[index] < FAN_OUT:
                return
            self._pending[index] = 0
            frame = self._folded([level[i] for i in range(-min(FAN_OUT, len(level)), 0)])
            index += 1
            if index == len(self._levels):
                self._levels.append(deque())
                self._pending.append(0)

    def truncate(self, step: int) -> None:
        """Forget the frames that reach ``step`` or further."""
        for level in self._levels:
            while level and level[-1].last_step >= step:
                level.pop()
        for index, level in enumerate(self._levels):
            above = self._levels[index + 1] if index + 1 < len(self._levels) else None
            done = above[-1].last_step if above else 0
            self._pending[index] = sum(frame.first_step > done for frame in level) % FAN_OUT

    def frames(self, first: int, last: int, most: int) -> list[Frame]:
        """Return the frames of the steps ``first`` to ``last`` in order, at most about ``most``."""
        chosen = len(self._levels) - 1
        for index, level in enumerate(self._levels):
            covers = level and (level[0].first_step <= first or level[0].first_step <= self._first_step)
            if covers and sum(first <= frame.last_step and frame.first_step <= last for frame in level) <= most:
                chosen = index
                break
        frames: list[Frame] = []
        done = first - 1
        for index in range(chosen, -1, -1):
            frames += [frame for frame in self._levels[index] if frame.last_step > done and frame.first_step <= last]
            if frames:
                done = max(done, frames[-1].last_step)
        return frames

    @property
    def _first_step(self) -> int:
        return next((level[0].first_step for level in reversed(self._levels) if level), 0)

    def _folded(self, frames: Sequence[Frame]) -> Frame:
        """Return one frame with the means over consecutive frames, of measured values only."""
        values = tuple(
            _mean([part for frame in frames if (part := frame.values[metric]) is not None])
            for metric in range(self._metrics)
        )
        return Frame(frames[0].first_step, frames[-1].last_step, values)


def _mean(parts: Sequence[array[float]]) -> array[float] | None:
    """Return the mean of each rank's values, ignoring those that are not finite."""
    if len(parts) < 2:
        return parts[0] if parts else None
    longest = max(map(len, parts))
    if any(len(part) < longest for part in parts):  # a rank that first appeared later
        parts = [part + array("f", [nan] * (longest - len(part))) for part in parts]
    count = len(parts)
    means = [total / count for total in map(sum, zip(*parts, strict=True))]
    if not isfinite(sum(means)):
        means = [_finite_mean(values) for values in zip(*parts, strict=True)]
    return array("f", means)


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if isfinite(value)]
    return sum(finite) / len(finite) if finite else nan
