"""Curves of a user's own metrics, and of the gradient noise scale, over the steps. Pure, and of bounded memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from math import isfinite, nan

from gputrain_tui.history.series import Window, fill_gaps
from gputrain_tui.state.newest_metrics import MAX_NAMES, own_values
from trainer.contract.record import Metrics, NoiseScale

NOISE_SCALE = "gradient noise scale, samples"
"""Name of its curve."""
MAX_POINTS = 2048
"""Points kept of a curve; at twice as many, those of neighbouring steps are merged."""


class MetricCurve:
    """Lowest, mean and highest value over the ranks, and over the steps of a point once steps are merged."""

    def __init__(self) -> None:
        self._width = 1
        """Steps of a point: a power of two."""
        self._points = array("q")
        """Number of each point: of its steps by ``_width``."""
        self._low, self._high, self._sum = array("d"), array("d"), array("d")
        self._count = array("q")
        self._last: dict[int, int] = {}
        """Newest step of each rank, since the last return to an earlier step."""

    def add(self, rank: int, step: int, value: float) -> None:
        if step < self._last.get(rank, 0):  # a restart from a checkpoint
            self._truncate(step)
        self._last[rank] = step
        if not isfinite(value):
            return
        point = step // self._width
        index = bisect_left(self._points, point)
        if index < len(self._points) and self._points[index] == point:
            self._low[index] = min(self._low[index], value)
            self._high[index] = max(self._high[index], value)
            self._sum[index] += value
            self._count[index] += 1
            return
        self._points.insert(index, point)
        for values in (self._low, self._high, self._sum):
            values.insert(index, value)
        self._count.insert(index, 1)
        if len(self._points) >= 2 * MAX_POINTS:
            self._merge()

    def _truncate(self, step: int) -> None:
        self._last.clear()
        kept = bisect_left(self._points, step // self._width)
        for values in (self._points, self._low, self._high, self._sum, self._count):
            del values[kept:]

    def _merge(self) -> None:
        points = list(zip(self._points, self._low, self._high, self._sum, self._count, strict=True))
        for values in (self._points, self._low, self._high, self._sum, self._count):
            del values[:]
        self._width *= 2
        for point, low, high, total, count in points:
            if self._points and self._points[-1] == point // 2:
                self._low[-1], self._high[-1] = min(self._low[-1], low), max(self._high[-1], high)
                self._sum[-1] += total
                self._count[-1] += count
            else:
                self._points.append(point // 2)
                self._low.append(low)
                self._high.append(high)
                self._sum.append(total)
                self._count.append(count)

    @property
    def span(self) -> tuple[int, int]:
        """First and last step; 0 and 0 without any."""
        if not self._points:
            return 0, 0
        return self._points[0] * self._width, self._points[-1] * self._width + self._width - 1

    def window(self, columns: int, span: tuple[int, int]) -> Window:
        """Return the band over a range of steps in columns; ``middle`` is the mean of the values in a column.

        Columns between two values are interpolated, since not every step may have one.
        """
        first, last = span
        low, mean, high = ([nan] * columns for _ in range(3))
        begin = bisect_left(self._points, first // self._width)
        end = bisect_right(self._points, last // self._width)
        sums, counts = [0.0] * columns, [0] * columns
        for index in range(begin, end):
            step = min(max(self._points[index] * self._width + (self._width - 1) / 2, first), last)
            column = min(int((step - first) * columns / (last - first + 1)), columns - 1)
            if counts[column]:
                low[column] = min(low[column], self._low[index])
                high[column] = max(high[column], self._high[index])
            else:
                low[column], high[column] = self._low[index], self._high[index]
            sums[column] += self._sum[index]
            counts[column] += self._count[index]
        for column, count in enumerate(counts):
            if count:
                mean[column] = sums[column] / count
        for values in (low, mean, high):
            fill_gaps(values)
        return Window(first_step=first, last_step=last, low=low, middle=mean, high=high)


class MetricCurves:
    """The curves of a run by name, changed by ``apply`` only; ``version`` grows with each change."""

    def __init__(self) -> None:
        self.version = 0
        self._curves: dict[str, MetricCurve] = {}

    def apply(self, event: Metrics | NoiseScale) -> None:
        self.version += 1
        if isinstance(event, Metrics):
            rank, values = event.rank, own_values(event)
        else:
            rank, values = 0, iter(() if event.samples is None else [(NOISE_SCALE, event.samples)])
        for name, value in values:
            curve = self._curves.get(name)
            if curve is None:
                if len(self._curves) >= MAX_NAMES:
                    continue
                curve = self._curves[name] = MetricCurve()
            curve.add(rank, event.step, value)

    @property
    def names(self) -> list[str]:
        """Names in the order in which they appeared."""
        return list(self._curves)

    def __getitem__(self, name: str) -> MetricCurve:
        return self._curves[name]
