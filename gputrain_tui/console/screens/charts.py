"""Base of the screens on a run: the chart keys, and stopping the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.screen import Screen

from gputrain_tui.console.screens.app_protocol import app_of
from gputrain_tui.console.widgets.band_chart import BandChart
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.panel import Panel

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun

CHART_INTERVAL_S = 0.25
"""Seconds between two repaints of a chart; the table is repainted at every tick."""
WINDOW_STEPS = (None, 1000, 100)
"""Steps that the charts show; None: the whole run."""
SMOOTHING_WEIGHTS = (0.0, 0.6, 0.9, 0.97)
"""Weight of earlier values in an exponential average."""


class ChartScreen(Screen[None]):
    """A screen on a run, with charts."""

    def __init__(self, live: LiveRun) -> None:
        super().__init__()
        self.live = live
        self._window = 0
        self._smoothing = 0

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
        self._smoothing = (self._smoothing + 1) % len(SMOOTHING_WEIGHTS)
        for chart in self.query(BandChart):
            chart.show(last=WINDOW_STEPS[self._window], smoothing=SMOOTHING_WEIGHTS[self._smoothing])

    def action_stop_run(self) -> None:
        """Stop the run, after a question."""
        if self.live.over:
            app_of(self).report(f"{self.live.id} has ended: {self.live.status}")
        else:
            app_of(self).ask_to_stop(self.live.run)
