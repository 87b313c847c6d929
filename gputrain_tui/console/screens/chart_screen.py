"""Base of the run and the rank screen: repaint clock, chart keys, curves of earlier runs, stopping the run."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.events import Resize
from textual.geometry import Size

from gputrain_tui.console.screens.console_screen import ConsoleScreen, next_of
from gputrain_tui.console.screens.start_and_stop import confirm_stop_of_screen
from gputrain_tui.console.widgets.band_chart import BandChart, ChartDragged, EarlierCurve
from gputrain_tui.console.widgets.chart_view import ChartView
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.overlay_chart import CurveReader
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.run_header import RunHeader
from gputrain_tui.history.run_folders import ancestors_of
from gputrain_tui.history.series import BandMetric
from gputrain_tui.lifecycle.live_run import POLL_BUDGET_S
from gputrain_tui.tables import printable

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.lifecycle.live_run import LiveRun

CHART_INTERVAL_S = 0.25
"""Seconds between two repaints of a chart; the table is repainted at every tick."""
WINDOW_STEPS = (None, 1000, 100)
"""Steps that the charts show; None: the whole run."""
SMOOTHING_STEPS = (0, 10, 100, 1000)
"""Steps over which curves are smoothed; 0: not at all."""


def offer_metrics(screen: ConsoleScreen, names: Sequence[str], choose: Callable[[str | None], None]) -> None:
    """Offer a user's own metrics to draw in place of the loss; ``choose`` gets None for the loss."""
    if not names:
        screen.console.report("no metrics of its own are reported: see ?, topic scripts or tasks")
        return
    choices = [("loss", partial(choose, None)), *((printable(name), partial(choose, name)) for name in names)]
    screen.app.search_commands(choices, placeholder="metric to draw in place of the loss")


class ChartScreen(ConsoleScreen):
    """Screen of a run with charts."""

    EVERY_TICK: ClassVar[str]
    """Id of the panel that is repainted at every tick; the others are repainted every ``CHART_INTERVAL_S``."""

    def __init__(self, live: LiveRun) -> None:
        super().__init__()
        self.live = live
        self._window: int | None = None
        self._smoothing = 0
        self._over = live.over
        self.view = ChartView()
        self._ancestors: list[CurveReader] = []
        """Curves of the run that this one resumed, of the run that that one resumed, and so on."""
        self._drawn_first_steps: list[int] = []
        """First step of the run and of each ancestor when the curves were drawn last."""
        self._underlay: CurveReader | None = None
        self._painted_at: dict[str | None, float] = {}
        """Time of each panel's last repaint, monotonic seconds."""

    @abstractmethod
    def place_panels(self) -> None: ...

    @property
    def panel_size(self) -> Size:
        return Size(max(self.app.size.width - 2, 0), max(self.app.size.height - 3, 0))

    def on_resize(self, event: Resize) -> None:
        self.place_panels()

    def tick(self) -> None:
        self._read_earlier()
        now = time.monotonic()
        for turn, panel in enumerate(self.query_one("#panels").children):
            if panel.display and (panel.id == self.EVERY_TICK or self._is_due(panel.id, turn, now)):
                panel.tick()  # type: ignore[attr-defined]
        if self._is_due("header", 0, now):
            self.query_one(RunHeader).tick()
            self.after_events()

    def after_events(self) -> None:
        """Update the footer when the run ends: it offers other actions then."""
        if self.live.over != self._over:
            self._over = self.live.over
            self.query_one(KeyBar).redraw()

    def repaint(self) -> None:
        self._painted_at.clear()
        self.tick()

    def _is_due(self, name: str | None, turn: int, now: float) -> bool:
        """Return whether a panel is due, and if so note the time; the first times are staggered by ``turn``."""
        before = self._painted_at.get(name)
        if before is not None and now - before < CHART_INTERVAL_S:
            return False
        self._painted_at[name] = now if before is not None else now - turn % 3 * CHART_INTERVAL_S / 3
        return True

    def band_chart(self, metric: BandMetric, *, id: str) -> BandChart:
        return BandChart(self.live, metric, view=self.view, id=id)

    def _highlight_rank(self, rank: int | None) -> None:
        for child in self.query_one("#panels").children:
            if isinstance(child, Panel):
                child.selected_rank = rank

    # Earlier runs

    def on_screen_resume(self) -> None:
        """Find the ancestors of the run (the run that it resumed, and so on), once; an archive's are elsewhere."""
        if not self._ancestors and self.live.run.status.archived is None:
            self._find_ancestors()

    @work(group="ancestors", exclusive=True)
    async def _find_ancestors(self) -> None:
        self._ancestors = [CurveReader(run) for run in await asyncio.to_thread(ancestors_of, self.live.run)]
        self._show_earlier()

    @property
    def _readers(self) -> list[CurveReader]:
        return [*self._ancestors, *([self._underlay] if self._underlay is not None else [])]

    def on_unmount(self) -> None:
        for reader in self._readers:
            reader.close()

    def _read_earlier(self) -> None:
        deadline = time.perf_counter() + POLL_BUDGET_S
        for reader in self._readers:
            reader.poll(deadline)
        if self._ancestors and self._first_steps() != self._drawn_first_steps:
            self._show_earlier()

    def _first_steps(self) -> list[int]:
        return [series.first_step for series in (self.live.series, *(each.history.series for each in self._ancestors))]

    def _show_earlier(self) -> None:
        """Draw the curves of earlier runs below those of the run in all charts."""
        earlier = []
        self._drawn_first_steps = self._first_steps()
        for reader, until in zip(self._ancestors, self._drawn_first_steps, strict=False):
            if until > 0:  # 0: the run that resumed it has no step yet
                earlier.append(EarlierCurve(name=f"resumed at {until:,}", series=reader.history.series, until=until))
        if self._underlay is not None:
            earlier.append(EarlierCurve(name=self._underlay.run.id, series=self._underlay.history.series))
        for chart in self.query(BandChart):
            chart.earlier = earlier
            chart.redraw()

    def runs_of_recipe(self) -> list[Run]:
        """Return the other ones of the newest runs that are of the same recipe."""
        run = self.live.run
        runs = self.console.list_runs()
        return [each for each in runs if each.status.recipe == run.status.recipe and each.id != run.id]

    def action_underlay(self) -> None:
        others = self.runs_of_recipe()
        ids = [each.id for each in others]
        index = ids.index(self._underlay.run.id) + 1 if self._underlay and self._underlay.run.id in ids else 0
        if self._underlay is not None:
            self._underlay.close()
        self._underlay = CurveReader(others[index]) if index < len(others) else None
        if not others:
            self.console.report(f"no other of the newest runs is one of {self.live.run.status.recipe}")
        self._show_earlier()

    # Range, axis and cursor

    def _cursor_chart(self) -> BandChart | None:
        """Return the chart whose columns the cursor moves by: the focused one, or the first visible one."""
        charts = [chart for chart in self.query(BandChart) if chart.display and chart.size]
        return next((chart for chart in charts if chart.has_focus), charts[0] if charts else None)

    def _redraw_charts(self) -> None:
        for chart in self.query(BandChart):
            chart.redraw()

    def action_cursor(self, columns: int) -> None:
        chart = self._cursor_chart()
        if chart is not None:
            self.view.move(chart.default_span, chart.columns // 2, columns)
            self._redraw_charts()

    def action_range(self, closer: int) -> None:
        chart = self._cursor_chart()
        if chart is not None:
            self.view.zoom(chart.default_span, closer=bool(closer))
            self._redraw_charts()

    def action_axis(self) -> None:
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
        """Remove the cursor, or else the range; return False if there is neither."""
        if not self.view.back():
            return False
        self._redraw_charts()
        return True

    def action_scale(self) -> None:
        for chart in self.query(BandChart):
            chart.show(scale="log" if chart.chart_scale == "linear" else "linear", last=self._window)

    def action_metric(self) -> None:
        """Offer the user's own metrics for the chart of the loss."""

        def choose(name: str | None) -> None:
            chart = self.query_one("#loss", BandChart)
            chart.own_metric = name
            chart.redraw()

        offer_metrics(self, self.live.metrics.names, choose)

    def action_window(self) -> None:
        self.view.span = None
        self._window = next_of(WINDOW_STEPS, self._window)
        for chart in self.query(BandChart):
            chart.show(last=self._window)
        for late in self.query(LatenessMap):
            late.show(last=self._window)

    def action_smooth(self) -> None:
        self._smoothing = next_of(SMOOTHING_STEPS, self._smoothing)
        for chart in self.query(BandChart):
            chart.show(last=self._window, smoothing=self._smoothing)

    def action_stop_run(self) -> None:
        confirm_stop_of_screen(self.console, self.live)
