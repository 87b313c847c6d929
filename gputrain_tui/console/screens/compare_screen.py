"""Compare screen: loss, throughput or synchronisation of two to six runs, and the differing keys of their recipes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical

from gputrain_tui.console.screens.chart_screen import SMOOTHING_STEPS, offer_metrics
from gputrain_tui.console.screens.console_screen import Page, next_of
from gputrain_tui.console.widgets.canvas import Listing
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, crop_start, fit_row, pad, title_row
from gputrain_tui.console.widgets.overlay_chart import OverlayChart
from gputrain_tui.history.comparison import MEASURES, DifferingValues
from gputrain_tui.history.run_folders import Run
from gputrain_tui.report.load_report import recipe_differences
from gputrain_tui.state.share_changes import shares_text
from gputrain_tui.tables import cut_apart, printable
from trainer.contract.errors import RequestError


class Differences(Listing[DifferingValues]):
    """List of the keys in which the recipes differ."""

    def __init__(self, runs: int, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._runs = runs
        self.differences: list[DifferingValues] | None = None
        self.problem = ""

    def _widths(self, width: int) -> tuple[int, int]:
        keys = max((len(difference.key) for difference in self.differences or ()), default=10)
        keys = min(keys + 2, max(width // 3, 12))
        return keys, max((width - keys - 1) // self._runs - 2, 4)

    def head(self, width: int) -> list[Row]:
        count = len(self.lines)
        text = f"  differ in {count} key{'s' * (count != 1)}" if count else ""
        title = title_row(width, [("recipes", "title"), (text, "dim")])
        if not count:
            return [title]
        keys, cells = self._widths(width)
        row: Row = [(" " * (keys + 1), "base")]
        for index in range(self._runs):
            row += [(f"{index + 1}".ljust(cells), f"curve-{index}"), ("  ", "base")]
        return [title, fit_row(row, width)]

    def row(self, line: DifferingValues, width: int) -> Row:
        keys, cells = self._widths(width)
        row: Row = [(" ", "base"), (pad(crop_start(line.key, keys - 1), keys), "dim")]
        for value in cut_apart([printable(value) for value in line.values], cells):
            row += [(pad(value or EMPTY, cells), "bright"), ("  ", "base")]
        return fit_row(row, width)

    def empty(self, width: int, height: int) -> list[Row]:
        if self.problem:
            return [[], fit_row([(" ", "base"), (printable(self.problem), "warning")], width)]
        return centred_text(width, height, ["reading" if self.differences is None else "The recipes are equal."])


class CompareScreen(Page):
    """The compare screen."""

    PLACE = "compare"
    TAB = "history"
    CSS_PATH = "compare.tcss"
    AUTO_FOCUS = "#differences"

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__()
        self._runs = runs
        self._curves = OverlayChart(id="curves")

    def body(self) -> ComposeResult:
        with Vertical(id="comparison"):
            yield self._curves
            yield Differences(len(self._runs), id="differences")

    def on_mount(self) -> None:
        self._curves.show(self._runs)
        self._show_differences()
        self.tick()

    @work(group="recipes")
    async def _show_differences(self) -> None:
        table = self.query_one(Differences)
        try:
            found = await asyncio.to_thread(recipe_differences, self._runs)
            table.differences = [*found, *_shares(self._runs)]
        except RequestError as error:
            table.differences, table.problem = [], str(error)
        table.lines = table.differences
        table.styles.height = min(max(len(table.lines), 1) + 3, max(self.size.height // 3, 5))
        table.redraw()

    def tick(self) -> None:
        self._curves.tick()

    def action_axis(self) -> None:
        self._curves.over_time = not self._curves.over_time
        self._curves.redraw()

    def action_measure(self) -> None:
        if self._curves.own_metric is not None:
            self._curves.own_metric = None
        else:
            self._curves.measure = next_of(MEASURES, self._curves.measure)
        self._curves.redraw()

    def action_metric(self) -> None:
        """Offer the runs' own metrics."""

        def choose(name: str | None) -> None:
            self._curves.own_metric = name
            self._curves.redraw()

        offer_metrics(self, self._curves.metric_names, choose)

    def action_scale(self) -> None:
        self._curves.scale = "linear" if self._curves.scale == "log" else "log"
        self._curves.redraw()

    def action_smooth(self) -> None:
        self._curves.smoothing = next_of(SMOOTHING_STEPS, self._curves.smoothing)
        self._curves.redraw()

    def action_back(self) -> None:
        self.dismiss()


def _shares(runs: Sequence[Run]) -> list[DifferingValues]:
    """Return the newest shares of runs of which any has balanced ones, as a row below the keys of their recipes."""
    values = tuple("" if run.status.shares is None else shares_text(run.status.shares) for run in runs)
    return [DifferingValues(key="shares", values=values)] if any(values) else []
