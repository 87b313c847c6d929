"""Losses of one run or several, read from their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from gputrain_tui.console.widgets.band_chart import Scale, chart_columns
from gputrain_tui.console.widgets.canvas import CURVES, Canvas, role_classes
from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.console.widgets.overlay_chart import Overlay, OverlayLine, draw_overlay, legend
from gputrain_tui.history.compare import LossHistory, resampled
from gputrain_tui.history.runs import ENDED, Run, RunReader
from gputrain_tui.history.series import smooth

PORTION_BYTES = 128 << 10
"""Bytes per read, small against the budget."""
LATE_START_SHARE = 0.1
"""Share of the axis from which runs that all start later do not begin it at 0."""


class LossReader:
    """Reads the loss of one run in portions."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = LossHistory(run.status.world_size)
        self.behind = True
        """Whether more is there than was read."""
        self._reader = RunReader(run.dir)

    def poll(self, may_go_on: Callable[[], bool]) -> bool:
        """Read what was appended; return whether anything changed."""
        if not self.behind and self.run.state in ENDED:
            return False  # nothing more will come
        was_behind = self.behind
        came = False
        while True:
            events = self._reader.poll(PORTION_BYTES)
            for event in events:
                self.history.apply(event)
            came = came or bool(events)
            self.behind = self._reader.backlog_bytes > 0
            if not self.behind or not may_go_on():
                return came or was_behind != self.behind

    def close(self) -> None:
        """Close the record."""
        self._reader.close()


class LossCurves(Canvas):
    """The losses of the runs."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(*CURVES)

    def __init__(self, *, named: bool = True, id: str | None = None) -> None:
        """Show nothing yet.

        Args:
            named: whether a legend names the runs.
            id: of the widget.
        """
        super().__init__(id=id)
        self.readers: Sequence[LossReader] = ()
        self._named = named
        self.over_time = False
        self.scale: Scale = "linear"
        self.smoothing = 0.0

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the chart and its legend."""
        columns = chart_columns(width)
        histories = [reader.history for reader in self.readers]
        ends = [h.last_second if self.over_time else float(h.last_step) for h in histories]
        last = max(ends, default=0.0)
        begins = [h.first_step for h in histories if h.first_step]
        first = float(min(begins, default=0)) if not self.over_time else 0.0
        first = first if first > LATE_START_SHARE * last else 0.0
        lines = []
        for reader, history in zip(self.readers, histories, strict=True):
            points = history.points(columns, over_time=self.over_time)
            values = smooth(resampled(points, columns, last, first=first), self.smoothing)
            lines.append(
                OverlayLine(name=reader.run.id, values=values, value=history.loss, best=history.best_validation)
            )
        remarks = [f"smooth {self.smoothing:g}"] if self.smoothing else []
        if any(reader.behind for reader in self.readers):
            remarks.append("reading")
        overlay = Overlay(
            lines=lines, first=first, last=last, over_time=self.over_time, scale=self.scale, remarks=tuple(remarks)
        )
        told = legend(lines, width) if self._named else []
        gap: list[Row] = [[]] if told and height >= 20 else []
        return draw_overlay(overlay, width, height - len(told) - len(gap)) + told + gap
