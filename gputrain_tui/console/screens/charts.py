"""Base of the screens on a run: the clock, the chart keys, and stopping the run."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from textual.events import Resize
from textual.geometry import Size

from gputrain_tui.console.screens.app_protocol import app_of
from gputrain_tui.console.screens.console_screen import ConsoleScreen
from gputrain_tui.console.widgets.band_chart import BandChart
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.run_header import RunHeader
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
        return BandChart(self.live, metric, title, unit, empty=empty, spiky=metric != "loss", id=id)

    def _point_at(self, rank: int | None) -> None:
        """Highlight a rank in every panel, or none."""
        for child in self.query_one("#panels").children:
            if isinstance(child, Panel):
                child.selected_rank = rank

    def action_scale(self) -> None:
        """Change between a linear and a logarithmic axis."""
        for chart in self.query(BandChart):
            chart.show(scale="log" if chart.chart_scale == "linear" else "linear", last=WINDOW_STEPS[self._window])

    def action_window(self) -> None:
        """Show the whole run, or its last steps."""
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
            app_of(self).ask_to_stop(self.live.run)
