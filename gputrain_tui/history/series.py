"""The charts' time series: for every step the band over ranks of loss, step time and exposed synchronisation.

Events are collected by step; bands and lateness are computed once per step, when the last rank has reported it. Pure:
no clock, no I/O, bounded memory for any number of steps and ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, nan
from typing import Literal

from gputrain_tui.history.pyramid import NO_BAND, Band, BandPyramid, Frame, Point, RankFrames
from gputrain_tui.history.step_axis import StepAxis
from gputrain_tui.state.step_losses import run_loss
from gputrain_tui.state.synchronisation import late_ms
from trainer.contract.record import Step, mean_samples, single_steps
from trainer.contract.record.downsampled import DownsampledBlock

BandMetric = Literal["loss", "sync_exposed_ms", "step_ms"]
Metric = Literal["loss", "sync_exposed_ms", "step_ms", "late_ms"]
BAND_METRICS: tuple[BandMetric, ...] = ("loss", "sync_exposed_ms", "step_ms")
METRICS: tuple[Metric, ...] = (*BAND_METRICS, "late_ms")
"""Values of a frame per rank; ``late_ms`` is how much later this one was ready to synchronise than the first one."""
LEAD_SPANS, LEAD_COLUMNS = 5, 256
"""Smoothing spans before a range of steps from which its moving average is initialised, and the columns in which they
are read; older steps have a weight below 1 %."""
MAX_OPEN_EVENTS = 1 << 19
"""Memory bound: events kept of steps that some rank has not reported yet."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A metric's band over a range of steps, one value per column; NaN is a gap."""

    first_step: int
    last_step: int
    low: list[float]
    middle: list[float]
    """As of a ``Band``."""
    high: list[float]


class Series:
    """The curves of a run, changed by ``apply`` only.

    ``version`` grows with every complete step, so that a chart repaints only when there is something new.
    """

    def __init__(self, world_size: int = 0, synchronised: Callable[[], Sequence[Collection[int]]] = tuple) -> None:
        """Start without events; ``synchronised`` returns the sets of ranks that wait for each other, none: all do."""
        self.version = 0
        self._synchronised = synchronised
        self.world_size = world_size
        """Ranks that must report a step; grows with the ranks that appear in events, until ``change_world``."""
        self._is_fixed = False
        self.latest: dict[BandMetric, Band] = dict.fromkeys(BAND_METRICS, NO_BAND)
        self.axis = StepAxis()
        self._pyramids: dict[Metric, BandPyramid] = {metric: BandPyramid() for metric in BAND_METRICS}
        self._frames = RankFrames(len(METRICS))
        self._open: dict[int, dict[int, Step]] = {}
        """Events by rank, by row; a row is one step, or ``_width`` of them."""
        self._width = 1
        """Steps of a row: a power of two, at least the steps of one event."""
        self._completed = -1
        self._completed_time = 0.0
        """Newest event of the complete rows, Unix seconds."""

    def apply(self, event: Step) -> None:
        """Apply one rank's event, or a downsampled block.

        An event that covers several steps and has their single values is drawn step by step.
        """
        self.axis.apply(event)
        if event.step_ms_each is not None and self._width == 1:
            for each in single_steps(event):
                self._add_event(each)
        else:
            self._add_event(event)

    def _add_event(self, event: Step) -> None:
        if event.steps > self._width:
            self._widen(event.steps)
        width = self._width
        rank = event.rank
        key = event.step if width == 1 else (event.step - 1) // width
        if rank >= self.world_size:
            if self._is_fixed:  # late, of a rank that is gone
                return
            self.world_size = rank + 1
        row = self._open.get(key)
        min_open_steps = 256  # steps kept that some rank has not reported yet, for any number of ranks
        if row is None:
            if key <= self._completed:
                if event.time <= self._completed_time:
                    return  # its row was completed without it
                self._rewind(key)
            row = self._open[key] = {}
            if len(self._open) > min_open_steps and len(self._open) * self.world_size > MAX_OPEN_EVENTS:
                oldest = sorted(self._open)[: len(self._open) // 8 + 1]
                self._complete_until(oldest[-1])
                row = self._open.setdefault(key, {})
        elif width > 1 and rank in row:
            event = _merged(row[rank], event)
        row[rank] = event
        if len(row) >= self.world_size:
            self._complete_until(key if width == 1 else key - 1)

    def change_world(self, world_size: int) -> None:
        """Wait for so many ranks in each step from here on; steps that only others had to report are complete."""
        self.world_size, self._is_fixed = world_size, True
        full = [key for key, row in self._open.items() if all(rank in row for rank in range(world_size))]
        if full:
            self._complete_until(max(full) if self._width == 1 else max(full) - 1)

    def flush(self) -> None:
        """Complete the last steps that not every rank has reported, when no more events will come."""
        for key in sorted(self._open):
            self._complete_row(key)

    def coarsen(self, steps: int) -> None:
        """Merge the events of ``steps`` steps into one row until ``refine``.

        For blocks of a downsampled record: those of different ranks begin at different steps, and none covers more than
        ``steps``.
        """
        if steps > self._width:
            self._widen(steps)

    def refine(self) -> None:
        """Make a row of every single step from here on."""
        self.flush()
        self._completed, self._width = self.last_step, 1

    # Read by views

    @property
    def first_step(self) -> int:
        """Oldest step that is drawn; 0 when there is none."""
        return self._pyramids["loss"].first_step

    @property
    def last_step(self) -> int:
        """Newest step that is drawn; 0 when there is none."""
        return self._pyramids["loss"].last_step

    def span(self, last: int | None = None) -> tuple[int, int]:
        """Return the first and last step of the whole run, or of its last steps."""
        first, end = self.first_step, self.last_step
        return (first if last is None else max(first, end - last + 1)), end

    def window(
        self,
        metric: Metric,
        columns: int,
        *,
        rank: int | None = None,
        last: int | None = None,
        span: tuple[int, int] | None = None,
    ) -> Window:
        """Return a metric's band in so many columns, over the whole run, its last steps, or a span of steps.

        The band of one ``rank`` is its line, which ``late_ms`` has for single ranks only.
        """
        first, end = span or self.span(last)
        if rank is None:
            points = self._pyramids[metric].points(first, end, 4 * columns)
        else:
            points = self._rank_points(METRICS.index(metric), rank, first, end, 4 * columns)
        return _in_columns(points, first, end, columns, interpolated=metric != "loss")

    def _rank_points(self, metric: int, rank: int, first: int, end: int, most: int) -> Iterator[Point]:
        for frame in self._frames.frames(first, end, most):
            values = frame.values[metric]
            value = values[rank] if values is not None and rank < len(values) else nan
            yield Point(max(frame.first_step, first), Band(value, value, value))

    def smoothed_window(
        self, metric: Metric, columns: int, *, span: tuple[int, int], over: int, rank: int | None = None
    ) -> Window:
        """Return a window of a span of steps, smoothed over ``over`` steps as in a chart of the whole run; 0: not."""
        window = self.window(metric, columns, rank=rank, span=span)
        begin = max(self.first_step, span[0] - LEAD_SPANS * over)
        lead = None
        if 0 < begin < span[0] and over:
            lead = self.window(metric, LEAD_COLUMNS, rank=rank, span=(begin, span[0] - 1))
        return smooth_window(window, over, lead)

    def frames(self, first: int, last: int, most: int) -> list[Frame]:
        """Return the ranks' values over a range of steps, at most about ``most`` frames."""
        return self._frames.frames(first, last, most)

    # Changed by events

    def _widen(self, steps: int) -> None:
        """Widen rows to at least ``steps`` steps, those of one event: ranks begin their events at different steps."""
        old, self._width = self._width, 1 << (steps - 1).bit_length()
        rows, self._open = self._open, {}
        shift = 0 if old > 1 else 1  # rows of one step are counted from 1
        self._completed = (self._completed - shift + 1) * old // self._width - 1  # the newest row that is wholly drawn
        for key, row in rows.items():
            wide = self._open.setdefault((key - shift) * old // self._width, {})
            for rank, event in row.items():
                wide[rank] = _merged(wide[rank], event) if rank in wide else event

    def _rewind(self, key: int) -> None:
        first = key if self._width == 1 else key * self._width + 1
        for pyramid in self._pyramids.values():
            pyramid.truncate(first)
        self._frames.truncate(first)
        self._open.clear()
        self._completed = key - 1

    def _complete_until(self, key: int) -> None:
        """Complete the rows up to one; rows are opened about in order."""
        while self._open and (first := next(iter(self._open))) <= key:
            self._complete_row(first)
        if key in self._open:
            self._complete_row(key)

    def _complete_row(self, key: int) -> None:
        """Compute bands and lateness of one row, unless a later one is complete."""
        row = self._open.pop(key)
        if key <= self._completed or not row:
            return
        ranks = range(self.world_size)
        try:
            events: list[Step | None] = [row[rank] for rank in ranks]
        except KeyError:
            events = [row.get(rank) for rank in ranks]
        step = max(event.step for event in row.values())
        blocks = [event for event in row.values() if type(event) is DownsampledBlock]
        first = key if self._width == 1 else key * self._width + 1
        self.axis.count(first, step, *(sum(getattr(e, of) or 0 for e in row.values()) for of in ("samples", "tokens")))
        losses = [None if e is None else e.loss for e in events]
        loss = self._add_band("loss", step, losses, blocks, _mean_loss(row.values()))
        sync = self._add_band(
            "sync_exposed_ms", step, [None if e is None else e.sync_exposed_ms for e in events], blocks
        )
        duration = self._add_band("step_ms", step, [None if e is None else e.step_ms for e in events], blocks)
        late: array[float] | None = None
        if sync is not None and len(row) == self.world_size > 1:
            late = array("f", late_ms(sync, self._synchronised()))
        self._frames.append(Frame(first, step, (loss, sync, duration, late)))
        self._completed = key
        self._completed_time = max(event.time for event in row.values())
        self.version += 1

    def _add_band(
        self,
        metric: BandMetric,
        step: int,
        measured: list[float | None],
        blocks: list[DownsampledBlock],
        middle: float | None = None,
    ) -> array[float] | None:
        """Add one point to a metric's band; return the ranks' values, None where no rank has one.

        The band's middle is the median of the values where none is given.
        """
        values = [nan if value is None else value for value in measured]
        ordered = sorted(values)
        if not isfinite(sum(ordered)):
            ordered = sorted(value for value in values if isfinite(value))
        if not ordered:
            self._pyramids[metric].append(step, NO_BAND)
            return None
        low, high = ordered[0], ordered[-1]
        middle = _median(ordered) if middle is None else min(max(middle, low), high)  # sums are rounded
        for block in blocks:
            bottom, top = getattr(block, f"{metric}_low"), getattr(block, f"{metric}_high")
            if bottom is not None and top is not None:
                low, high = min(low, bottom), max(high, top)
        band = self.latest[metric] = Band(low, middle, high)
        self._pyramids[metric].append(step, band)
        return array("f", values)


def _mean_loss(events: Iterable[Step]) -> float | None:
    """Return the run's loss over the ranks' events of a row; None where no rank has one that is finite."""
    known = [e for e in events if e.loss is not None and isfinite(e.loss)]
    return run_loss((e.loss, mean_samples(e)) for e in known)


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _in_columns(points: Iterable[Point], first: int, end: int, columns: int, *, interpolated: bool) -> Window:
    """Return points of the steps ``first`` to ``end`` in columns: extremes, and the mean of their middles."""
    low, middle, high = [nan] * columns, [nan] * columns, [nan] * columns
    scale = columns / (end - first + 1)
    filled, parts, before = -1, 0, -1
    for step, (bottom, mid, top) in points:
        if not isfinite(mid):
            if not interpolated:
                before = -1
            continue
        column = min(int((step - first) * scale), columns - 1)
        if column != filled:
            if parts > 1:
                middle[filled] /= parts
            filled, parts = column, 1
            low[column], middle[column], high[column] = bottom, mid, top
        else:
            parts += 1
            middle[column] += mid
            low[column], high[column] = min(bottom, low[column]), max(top, high[column])
        if 0 <= before < column - 1:
            for values, value in ((low, bottom), (middle, mid), (high, top)):
                interpolate(values, before, column, value)
        before = column
    if parts > 1:
        middle[filled] /= parts
    return Window(first_step=first, last_step=end, low=low, middle=middle, high=high)


def smooth(values: list[float], span: float, steps_per_value: float) -> list[float]:
    """Return the exponential moving mean over the steps, without the bias of its start; gaps stay gaps.

    The average forgets by steps, not by values, so that it is the same at every width of a chart.

    ``span`` is the number of steps after which a value's weight has fallen to 1/e; 0: nothing is averaged.

    Source: Kingma and Ba, Adam, section 3 (the correction of the bias).
    """
    return _smooth_lines([values], span, steps_per_value)[0] if span else values


def smooth_window(window: Window, span: float, lead: Window | None = None) -> Window:
    """Return a band and its middle, smoothed alike: the middle stays inside.

    ``lead`` is the band right before it, from which the average is initialised.
    """
    if not span:
        return window
    before = None if lead is None else ([lead.low, lead.middle, lead.high], _steps_per_column(lead))
    lines = [window.low, window.middle, window.high]
    low, middle, high = _smooth_lines(lines, span, _steps_per_column(window), before)
    return replace(window, low=low, middle=middle, high=high)


def _steps_per_column(window: Window) -> float:
    return (window.last_step - window.first_step + 1) / max(len(window.middle), 1)


def _smooth_lines(
    lines: Sequence[list[float]],
    span: float,
    steps_per_value: float,
    before: tuple[Sequence[list[float]], float] | None = None,
) -> list[list[float]]:
    """Smooth lines alike: a column in which one of them is not finite is a gap of all.

    A value after a gap has the weight of the gap, too: a chart with more columns than steps has gaps between values.
    """
    totals, weight, gap = [0.0] * len(lines), 0.0, 0.0
    out: list[list[float]] = [[] for _ in lines]
    for part, steps, shown in ((*(before or ((), 0.0)), False), (lines, steps_per_value, True)):
        for column in zip(*part, strict=True):
            gap += steps
            if all(map(isfinite, column)):
                kept, gap = exp(-gap / span), 0.0
                weight = kept * weight + 1 - kept
                totals = [kept * total + (1 - kept) * value for total, value in zip(totals, column, strict=True)]
                column = tuple(total / weight for total in totals)
            if shown:
                for line, value in zip(out, column, strict=True):
                    line.append(value)
    return out


def fill_gaps(values: list[float]) -> None:
    """Interpolate the NaNs between two values: a long step spans several columns."""
    before = -1
    for current, value in enumerate(values):
        if value != value:
            continue
        if 0 <= before < current - 1:
            interpolate(values, before, current, value)
        before = current


def interpolate(values: list[float], before: int, after: int, value: float) -> None:
    """Fill the columns between ``before`` and ``after`` linearly, towards the ``value`` of ``after``."""
    start, length = values[before], after - before
    for column in range(before + 1, after):
        values[column] = start + (value - start) * (column - before) / length


def _merged(earlier: Step, later: Step) -> Step:
    """Merge two events of a rank in one row: measured values are averaged over their steps."""
    steps = earlier.steps + later.steps
    joined = DownsampledBlock(
        time=later.time, rank=later.rank, step=later.step, epoch=later.epoch, steps=steps,
        samples=_sum(earlier.samples, later.samples), tokens=_sum(earlier.tokens, later.tokens), begin=0, end=0,
    )  # fmt: skip
    blocks = [event for event in (earlier, later) if type(event) is DownsampledBlock]
    for name in BAND_METRICS:
        one, two = getattr(earlier, name), getattr(later, name)
        for extreme, of in (("low", min), ("high", max)):
            ends = [end for block in blocks if (end := getattr(block, f"{name}_{extreme}")) is not None]
            setattr(joined, f"{name}_{extreme}", of(ends, default=None))
        if one is not None and two is not None:
            setattr(joined, name, (one * earlier.steps + two * later.steps) / steps)
        else:
            setattr(joined, name, two if one is None else one)
    return joined


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else one + other
