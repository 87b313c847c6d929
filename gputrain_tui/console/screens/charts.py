"""Base of the screens on a run: the clock, the chart keys, and stopping the run."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.events import Resize
from textual.geometry import Size

from gputrain_tui.console.curve_reader import CurveReader
from gputrain_tui.console.live import POLL_BUDGET_S
from gputrain_tui.console.screens.app_protocol import app_of
from gputrain_tui.console.screens.console_screen import ConsoleScreen
from gputrain_tui.console.screens.start_and_stop import ask_to_stop
from gputrain_tui.console.widgets.band_chart import BandChart, ChartDragged, EarlierCurve
from gputrain_tui.console.widgets.chart_view import ChartView
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.run_header import RunHeader
from gputrain_tui.history.parent import ancestors_of
from gputrain_tui.history.runs import list_runs
from gputrain_tui.history.series import BandMetric

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun

CHART_INTERVAL_S = 0.25
"""Seconds between two repaints of a chart; the table is repainted at every tick."""
WINDOW_STEPS = (None, 1000, 100)
"""Steps that the charts show; None: the whole run."""
SMOOTHING_STEPS = (0, 10, 100, 1000)
"""Steps over which curves are smoothed; 0: not at all."""
CHARTS: dict[BandMetric, tuple[str, str, str]] = {
    "loss": ("loss", "nats", "no step yet"),
    "sync_exposed_ms": ("sync wait ms", "", "no gradient synchronisation was measured yet"),
    "step_ms": ("step ms", "", "no step was measured yet"),
}
"""Title and unit of each metric's chart, and its text where nothing was measured."""


class ChartScreen(ConsoleScreen):
    """A screen on a run, with charts."""

    EVERY_TICK: ClassVar[str]
    """Id of the panel that is repainted at every tick, each other one in its turn."""

    def __init__(self, live: LiveRun) -> None:
        super().__init__()
        self.live = live
        self._window = 0
        self._smoothing = 0
        self._over = live.over
        self.view = ChartView()
        """Range, axis and cursor of all charts."""
        self._ancestors: list[CurveReader] = []
        """The run that this one has resumed, the one that that has resumed, and so on."""
        self._begins: list[int] = []
        """First steps of these and of the run itself, as they were drawn."""
        self._below: CurveReader | None = None
        """The earlier run that lies below the curves."""
        self._painted_at: dict[str | None, float] = {}
        """Time of each panel's last repaint, monotonic seconds."""

    @abstractmethod
    def place_panels(self) -> None:
        """Lay out the panels."""

    @property
    def panel_size(self) -> Size:
        """Cells and lines of all panels together."""
        return Size(max(self.app.size.width - 2, 0), max(self.app.size.height - 3, 0))

    def on_resize(self, event: Resize) -> None:
        """Lay out again."""
        self.place_panels()

    def tick(self) -> None:
        """Repaint what changed."""
        self._read_earlier()
        now = time.monotonic()
        for turn, panel in enumerate(self.query_one("#panels").children):
            if panel.display and (panel.id == self.EVERY_TICK or self._is_due(panel.id, turn, now)):
                panel.tick()  # type: ignore[attr-defined]
        if self._is_due("header", 0, now):
            self.query_one(RunHeader).tick()
            self.after_events()

    def after_events(self) -> None:
        """Do what follows the repaint of the header: the footer offers what is next once the run has ended."""
        if self.live.over != self._over:
            self._over = self.live.over
            self.query_one(KeyBar).redraw()

    def repaint(self) -> None:
        """Bring everything up to date at once."""
        self._painted_at.clear()
        self.tick()

    def _is_due(self, name: str | None, turn: int, now: float) -> bool:
        """Return whether a panel is due; the first time staggers them."""
        before = self._painted_at.get(name)
        if before is not None and now - before < CHART_INTERVAL_S:
            return False
        self._painted_at[name] = now if before is not None else now - turn % 3 * CHART_INTERVAL_S / 3
        return True

    def band_chart(self, metric: BandMetric, *, id: str) -> BandChart:
        """Return the chart of a metric."""
        title, unit, empty = CHARTS[metric]
        return BandChart(self.live, metric, title, unit, view=self.view, empty=empty, spiky=metric != "loss", id=id)

    def _point_at(self, rank: int | None) -> None:
        """Highlight a rank in every panel, or none."""
        for child in self.query_one("#panels").children:
            if isinstance(child, Panel):
                child.selected_rank = rank

    # Earlier runs

    def on_screen_resume(self) -> None:
        """Read the run that this one has resumed, once."""
        if not self._ancestors and not self.is_archive:
            self._find_ancestors()

    @property
    def is_archive(self) -> bool:
        """Whether the run is an archive's, whose paths are another machine's."""
        return self.live.run.status.archived is not None

    @work(group="ancestors", exclusive=True)
    async def _find_ancestors(self) -> None:
        self._ancestors = [CurveReader(run) for run in await asyncio.to_thread(ancestors_of, self.live.run)]
        self._show_earlier()

    def on_unmount(self) -> None:
        """Close the records of earlier runs."""
        for reader in (*self._ancestors, self._below):
            if reader is not None:
                reader.close()

    def _read_earlier(self) -> None:
        """Read the records of earlier runs within the budget of a tick."""
        deadline = time.perf_counter() + POLL_BUDGET_S
        for reader in (*self._ancestors, self._below):
            if reader is not None:
                reader.poll(deadline)
        if self._ancestors and self._first_steps() != self._begins:
            self._show_earlier()

    def _first_steps(self) -> list[int]:
        return [series.first_step for series in (self.live.series, *(each.history.series for each in self._ancestors))]

    def _show_earlier(self) -> None:
        """Put earlier runs below all charts."""
        earlier = []
        self._begins = self._first_steps()
        for reader, until in zip(self._ancestors, self._begins, strict=False):
            if until > 0:  # else the run that went on from it has no step yet
                earlier.append(EarlierCurve(name=f"resumed at {until:,}", series=reader.history.series, until=until))
        if self._below is not None:
            earlier.append(EarlierCurve(name=self._below.run.id, series=self._below.history.series))
        for chart in self.query(BandChart):
            chart.earlier = earlier
            chart.redraw()

    def action_underlay(self) -> None:
        """Lay the next earlier run of the same recipe below the curves, and after the last one none."""
        now = self.live.run
        found = [run for run in list_runs() if run.status.recipe == now.status.recipe and run.id != now.id]
        before = None if self._below is None else self._below.run.id
        ids = [run.id for run in found]
        index = ids.index(before) + 1 if before in ids else 0
        if self._below is not None:
            self._below.close()
        self._below = CurveReader(found[index]) if index < len(found) else None
        if not found:
            app_of(self).report(f"there is no other run of {now.status.recipe}")
        self._show_earlier()

    # Range, axis and cursor

    def _chart(self) -> BandChart | None:
        """Return the chart by which the cursor moves: the one with the focus, or the first that is shown."""
        charts = [chart for chart in self.query(BandChart) if chart.display and chart.size]
        return next((chart for chart in charts if chart.has_focus), charts[0] if charts else None)

    def _redraw_charts(self) -> None:
        for chart in self.query(BandChart):
            chart.redraw()

    def action_cursor(self, columns: int) -> None:
        """Move the cursor of the charts."""
        chart = self._chart()
        if chart is not None:
            self.view.move(chart.whole, chart.columns // 2, columns)
            self._redraw_charts()

    def action_range(self, closer: int) -> None:
        """Show fewer steps around the cursor, or more."""
        chart = self._chart()
        if chart is not None:
            self.view.zoom(chart.whole, closer=bool(closer))
            self._redraw_charts()

    def action_axis(self) -> None:
        """Draw over the next axis on which the run was measured."""
        self.view.next_axis(self.live.series.axis)
        self._redraw_charts()

    @on(ChartDragged)
    def _dragged(self, message: ChartDragged) -> None:
        if message.until is None:
            self.view.cursor = message.step
        else:
            self.view.show_range(message.step, message.until)
        self._redraw_charts()

    def view_back(self) -> bool:
        """Remove the cursor, or else the range; return False where there is neither."""
        if not self.view.back():
            return False
        self._redraw_charts()
        return True

    def action_scale(self) -> None:
        """Change between a linear and a logarithmic axis."""
        for chart in self.query(BandChart):
            chart.show(scale="log" if chart.chart_scale == "linear" else "linear", last=WINDOW_STEPS[self._window])

    def action_window(self) -> None:
        """Show the whole run, or its last steps."""
        self.view.span = None
        self._window = (self._window + 1) % len(WINDOW_STEPS)
        for chart in self.query(BandChart):
            chart.show(last=WINDOW_STEPS[self._window])
        for late in self.query(LatenessMap):
            late.show(last=WINDOW_STEPS[self._window])

    def action_smooth(self) -> None:
        """Smooth the curves more, and from the most back to not at all."""
        self._smoothing = (self._smoothing + 1) % len(SMOOTHING_STEPS)
        for chart in self.query(BandChart):
            chart.show(last=WINDOW_STEPS[self._window], smoothing=SMOOTHING_STEPS[self._smoothing])

    def action_stop_run(self) -> None:
        """Stop the run, after a question."""
        if self.live.over:
            app_of(self).report(f"{self.live.id} has ended: {self.live.status}")
        else:
            ask_to_stop(app_of(self), self.live.run)
