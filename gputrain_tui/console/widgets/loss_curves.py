"""Chart of loss, throughput or exposed synchronisation of one or several runs, read from their records."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar

from gputrain_tui.console.live import BACKLOG_PAUSE_S, POLL_BUDGET_S, PORTION_BYTES
from gputrain_tui.console.widgets.canvas import CURVES, Canvas, role_classes
from gputrain_tui.console.widgets.curve_drawing import Scale, chart_columns
from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.console.widgets.overlay_chart import Overlay, OverlayLine, draw_overlay, legend
from gputrain_tui.history.comparison import CurveHistory, Measure, resampled
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import ENDED


class CurveReader:
    """Reader of one run's curves, in portions."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = CurveHistory(run.status.world_size)
        self.behind = True
        """Whether a part of the record is still to be read."""
        self._reader = RunReader(run.dir)

    def poll(self, deadline: float) -> bool:
        """Read appended events until about ``deadline`` (of ``perf_counter``); return whether anything changed."""
        if not self.behind and self.run.state in ENDED:
            return False  # the record is complete
        was_behind = self.behind
        has_events = False
        while True:
            events = self._reader.poll(PORTION_BYTES)
            for event in events:
                self.history.apply(event)
            has_events = has_events or bool(events)
            self.behind = self._reader.backlog_bytes > 0
            if not self.behind or perf_counter() >= deadline:
                return has_events or was_behind != self.behind

    def close(self) -> None:
        """Close the record."""
        self._reader.close()


LATE_START_SHARE = 0.1
"""Share of the axis: if the first steps of all runs lie beyond it (resumed runs), the axis begins there, not at 0."""


class LossCurves(Canvas):
    """Chart of several runs' curves."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(*CURVES)

    over_time = False
    measure: Measure = "loss"
    scale: Scale = "linear"
    smoothing = 0
    """Steps over which the curves are smoothed; 0: not at all."""
    _readers: Sequence[CurveReader] = ()
    _reading_on = False

    def __init__(self, *, named: bool = True, id: str | None = None) -> None:
        """Make an empty chart; ``named``: with a legend of the runs' names."""
        super().__init__(id=id)
        self._named = named

    @property
    def runs(self) -> list[Run]:
        """The runs shown."""
        return [reader.run for reader in self._readers]

    def show(self, runs: Sequence[Run]) -> None:
        """Show runs, and close the records of those shown before."""
        self.on_unmount()
        self._readers = [CurveReader(run) for run in runs]
        self.redraw()

    def on_unmount(self) -> None:
        """Close the records."""
        for reader in self._readers:
            reader.close()

    def tick(self) -> None:
        """Read appended events within the budget and redraw; with a backlog, go on after a short pause."""
        if not self.display:
            return
        deadline = perf_counter() + POLL_BUDGET_S
        changed = [reader.poll(deadline) for reader in self._readers]
        if any(changed):
            self.redraw()
        if any(reader.behind for reader in self._readers) and not self._reading_on:
            self._reading_on = True
            self.set_timer(BACKLOG_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        self._reading_on = False
        if self.screen.is_current:
            self.tick()

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the chart and its legend."""
        columns = chart_columns(width)
        histories = [reader.history for reader in self._readers]
        ends = [h.last_second if self.over_time else float(h.last_step) for h in histories]
        last = max(ends, default=0.0)
        begins = [h.first_step for h in histories if h.first_step]
        first = float(min(begins, default=0)) if not self.over_time else 0.0
        first = first if first > LATE_START_SHARE * last else 0.0
        lines = []
        for reader, history in zip(self._readers, histories, strict=True):
            points = history.points(columns, over_time=self.over_time, smoothing=self.smoothing, measure=self.measure)
            values = resampled(points, columns, last, first=first)
            lines.append(
                OverlayLine(
                    name=reader.run.id,
                    values=values,
                    value=history.loss,
                    best=history.best_validation,
                    samples_per_s=history.samples_per_s,
                    sync_share=history.sync_share,
                )
            )
        remarks = [f"smooth over {self.smoothing:,} steps"] if self.smoothing else []
        if any(reader.behind for reader in self._readers):
            remarks.append("reading")
        overlay = Overlay(
            lines=lines,
            first=first,
            last=last,
            over_time=self.over_time,
            measure=self.measure,
            scale=self.scale,
            remarks=tuple(remarks),
        )
        names = legend(lines, width) if self._named else []
        gap: list[Row] = [[]] if names and height >= 20 else []
        return draw_overlay(overlay, width, height - len(names) - len(gap)) + names + gap
