"""Compare screen: loss, throughput or synchronisation of two to six runs, and the differing keys of their recipes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.screens.charts_screen import SMOOTHING_STEPS
from gputrain_tui.console.screens.page import Page
from gputrain_tui.console.widgets.canvas import Listing
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, fit_row, title_row
from gputrain_tui.console.widgets.loss_curves import LossCurves
from gputrain_tui.history.comparison import MEASURES, RecipeDifference, differences
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle.recipe_to_run import recipe_of
from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.tables import printable
from trainer.contract.errors import RequestError


class Differences(Listing[RecipeDifference]):
    """List of the keys in which the recipes differ."""

    def __init__(self, runs: int, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._count = runs
        self.found: list[RecipeDifference] | None = None
        self.problem = ""

    def _widths(self, width: int) -> tuple[int, int]:
        keys = max((len(difference.key) for difference in self.found or ()), default=10)
        keys = min(keys + 2, max(width // 3, 12))
        return keys, max((width - keys - 1) // self._count - 2, 4)

    def head(self, width: int) -> list[Row]:
        """Return the title, and the numbers of the runs over their columns."""
        found = self.found or ()
        title = title_row(
            width,
            [("recipes", "title"), (f"  differ in {len(found)} key{'s' * (len(found) != 1)}" if found else "", "dim")],
        )
        if not found:
            return [title]
        keys, cells = self._widths(width)
        row: Row = [(" " * (keys + 1), "base")]
        for index in range(self._count):
            row += [(f"{index + 1}".ljust(cells), f"curve-{index}"), ("  ", "base")]
        return [title, fit_row(row, width)]

    def row(self, line: RecipeDifference, width: int) -> Row:
        """Return a key with its value in each recipe."""
        keys, cells = self._widths(width)
        row: Row = [(" ", "base"), (line.key[: keys - 1].ljust(keys), "dim")]
        for value in line.values:
            text = printable(value) or EMPTY
            text = text if len(text) <= cells else text[: cells - 1] + "…"
            row += [(text.ljust(cells), "bright"), ("  ", "base")]
        return fit_row(row, width)

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the error of reading the recipes, or the text for equal ones."""
        if self.problem:
            return [[], fit_row([(" ", "base"), (printable(self.problem), "warning")], width)]
        return centred_text(width, height, ["reading" if self.found is None else "The recipes are equal."])


class CompareScreen(Page):
    """The compare screen."""

    PLACE = "compare"
    TAB = "history"
    CSS_PATH = "compare.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("compare")]

    def __init__(self, runs: Sequence[Run]) -> None:
        """Compare two to six runs."""
        super().__init__()
        self._runs = runs

    def body(self) -> ComposeResult:
        """Yield chart and differences."""
        with Vertical(id="comparison"):
            yield LossCurves(id="curves")
            yield Differences(len(self._runs), id="differences")

    def on_mount(self) -> None:
        """Read the recipes in a thread, and the first part of the curves."""
        self.query_one(LossCurves).show(self._runs)
        self.query_one(Differences).focus()
        self._show_differences()
        self.tick()

    @work(group="recipes")
    async def _show_differences(self) -> None:
        table = self.query_one(Differences)
        try:
            table.found = differences(await asyncio.to_thread(lambda: [_recipe_of(run) for run in self._runs]))
        except RequestError as error:
            table.found, table.problem = [], str(error)
        table.lines = table.found
        table.styles.height = min(max(len(table.found), 1) + 3, max(self.size.height // 3, 5))
        table.redraw()

    def tick(self) -> None:
        """Read appended events, and redraw the curves."""
        self.query_one(LossCurves).tick()

    def action_axis(self) -> None:
        """Switch the horizontal axis between steps and time."""
        curves = self.query_one(LossCurves)
        curves.over_time = not curves.over_time
        curves.redraw()

    def action_measure(self) -> None:
        """Draw the next measure."""
        curves = self.query_one(LossCurves)
        curves.measure = MEASURES[(MEASURES.index(curves.measure) + 1) % len(MEASURES)]
        curves.redraw()

    def action_scale(self) -> None:
        """Switch the vertical axis between linear and logarithmic."""
        curves = self.query_one(LossCurves)
        curves.scale = "linear" if curves.scale == "log" else "log"
        curves.redraw()

    def action_smooth(self) -> None:
        """Smooth the curves by the next of ``SMOOTHING_STEPS``."""
        curves = self.query_one(LossCurves)
        curves.smoothing = SMOOTHING_STEPS[(SMOOTHING_STEPS.index(curves.smoothing) + 1) % len(SMOOTHING_STEPS)]
        curves.redraw()

    def action_back(self) -> None:
        """Return to the history screen."""
        self.dismiss()


def _recipe_of(run: Run) -> Recipe:
    """Return a run's recipe; for a user's own task this may run a process that prints its options.

    Raises:
        RequestError: the recipe cannot be read.
    """
    try:
        return load(recipe_of(run))
    except RequestError as error:
        raise RequestError(f"the recipe of {run.id} cannot be read: {error}") from None
