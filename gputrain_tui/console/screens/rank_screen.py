"""Rank screen: figures, charts and log of one rank, and on request its Python stack."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.geometry import Region

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.panel_container import (
    GAP_CELLS,
    MOST_PANELS,
    PanelContainer,
    grid_shape,
    layout_size,
    place_in_grid,
)
from gputrain_tui.console.screens.charts_screen import ChartScreen
from gputrain_tui.console.stack_request import StackRequest, request_stack
from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Copyable
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.log_view import LogView
from gputrain_tui.console.widgets.rank_facts import RankFacts, facts, facts_height
from gputrain_tui.console.widgets.root_cause import RootCause, failure_text
from gputrain_tui.console.widgets.run_header import RunHeader
from gputrain_tui.console.widgets.stack_view import StackView
from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun

CHART_IDS = ("loss", "sync", "step")
STACK_TIMEOUT_S = 3.0
"""Seconds before a request for a stack counts as unanswered."""


def arrange_rank(width: int, height: int, *, facts: int, below: str) -> dict[str, Region]:
    """Return the visible panels and their regions.

    Args:
        width: cells of the whole area.
        height: lines of the whole area.
        facts: lines of the figures, which stand on top.
        below: the panel shown last by its key; it is visible below the figures.
    """
    if width < 1 or height < 1:
        return {}
    area = Region(0, 0, width, height)
    size = layout_size(width, height)
    top, rest = area.split_horizontal(min(facts + (size != "narrow"), max(height // 2, 3)))
    if size == "narrow":
        columns, lines = grid_shape(rest)
        narrow = columns > 1 and lines == 1
        order = [*CHART_IDS, "log"][: min(columns * lines, MOST_PANELS)]
        if narrow and below not in CHART_IDS:
            order = [below]  # text needs the whole width
        elif below not in order:
            order[-1] = below
        return {"facts": top, **place_in_grid(rest, order, columns)}
    text = below if below in ("log", "stack") else "log"
    charts, bottom = rest.split_horizontal(rest.height // 2)
    each = (width - 2 * GAP_CELLS) // 3
    placed = {
        name: Region(
            index * (each + GAP_CELLS), charts.y, each if index < 2 else width - 2 * (each + GAP_CELLS), charts.height
        )
        for index, name in enumerate(CHART_IDS)
    }
    if size == "wide":
        log, stack = bottom.split_vertical(width * 3 // 5)
        return {"facts": top, **placed, "log": log,
                "stack": Region(stack.x + GAP_CELLS, stack.y, stack.width - GAP_CELLS, stack.height)}  # fmt: skip
    return {"facts": top, **placed, text: bottom}


class RankScreen(ChartScreen):
    """The rank screen."""

    PLACE = "rank"
    AUTO_FOCUS = ""
    EVERY_TICK = "log"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("rank"), *SCROLL_KEYS]

    def __init__(self, live: LiveRun, rank: int) -> None:
        super().__init__(live)
        self.rank = rank
        self._panel_below = "loss"
        self._request: StackRequest | None = None
        self._requested_at = 0.0

    def compose(self) -> ComposeResult:
        """Yield the panels."""
        live = self.live
        yield RunHeader(live, id="header")
        with PanelContainer(id="panels"):
            yield RankFacts(live, id="facts")
            yield self.band_chart("loss", id="loss")
            yield self.band_chart("sync_exposed_ms", id="sync")
            yield self.band_chart("step_ms", id="step")
            yield StackView(id="stack")
            yield LogView(live.run.dir, rank=self.rank, live=live, id="log")
        yield KeyBar(self.PLACE, over=lambda: live.over)

    def on_mount(self) -> None:
        """Highlight the rank in every panel, and lay out the panels."""
        self._highlight_rank(self.rank)
        self.place_panels()

    def tick(self) -> None:
        """Show a stack that has arrived, and repaint the changed panels."""
        self._show_arrived_stack()
        super().tick()

    def place_panels(self) -> None:
        """Lay out the panels."""
        width, height = self.panel_size
        count = len(facts(self.live.state, self.rank, 0.0))
        self.query_one(PanelContainer).place(
            arrange_rank(width, height, facts=facts_height(width, count), below=self._panel_below)
        )

    # Actions

    def action_show(self, name: str) -> None:
        """Show a panel and focus it; in a narrow terminal, a second time shows the loss instead."""
        widget = next(iter(self.query(f"#{name}")), None)
        if widget is None:
            return
        self._panel_below = "loss" if self._panel_below == name and layout_size(*self.app.size) == "narrow" else name
        self.place_panels()
        if widget.can_focus and widget.display:
            widget.focus()

    @property
    def _text(self) -> StackView | LogView:
        """The visible text panel: the stack if it was requested last, else the log."""
        stack = self.query_one(StackView)
        return stack if stack.display and self._panel_below == "stack" else self.query_one(LogView)

    def action_scroll_by(self, lines: int) -> None:
        """Scroll the stack or the log."""
        self._text.wheel(lines)

    def action_edge(self, side: int) -> None:
        """Go to the first or the last line of the stack or the log."""
        self._text.action_edge(side)

    def save_view(self) -> Callable[[], None]:
        """Return a function that restores the choice of panels."""
        below = self._panel_below

        def restore() -> None:
            self._panel_below = below
            self.place_panels()

        return restore

    def copyable(self) -> Copyable | None:
        """Return the stack, else the rank's failure, else the line of the log under its cursor."""
        failure = self.live.state.rank(self.rank).failure
        stack = self.query_one(StackView).copyable()
        if stack is None and failure is not None:
            return Copyable(failure_text(RootCause(failure=failure)), "the failure")
        return stack or self.query_one(LogView).copyable()

    def action_back(self) -> None:
        """Remove the charts' cursor, else their range, else return to the run screen."""
        if not self.view_back():
            self.dismiss()

    def _step_rank(self, step: int) -> None:
        ranks = sorted(self.live.state.ranks)
        if not ranks:
            return
        index = ranks.index(self.rank) + step if self.rank in ranks else 0
        self.rank = ranks[index % len(ranks)]
        self._request = None
        self.query_one(StackView).show([])
        self.query_one(LogView).show_rank(self.rank)
        self._highlight_rank(self.rank)
        self.place_panels()

    def action_next_rank(self) -> None:
        """Go to the next rank."""
        self._step_rank(1)

    def action_previous_rank(self) -> None:
        """Go to the previous rank."""
        self._step_rank(-1)

    def action_next_flagged(self) -> None:
        """Go to the next rank that failed or that a finding is about."""
        flagged = sorted(self.live.state.flagged - {self.rank})
        if flagged:
            ranks = sorted(self.live.state.ranks)
            self._step_rank(
                ranks.index(next((rank for rank in flagged if rank > self.rank), flagged[0])) - ranks.index(self.rank)
            )

    def action_stack(self) -> None:
        """Request the Python stack of the rank's process."""
        self._panel_below = "stack"
        self.place_panels()
        view = self.query_one(StackView)
        try:
            self._request = request_stack(self.live.run.dir, self.live.state.rank(self.rank))
        except RequestError as error:
            self._request = None
            view.show([], str(error))
            return
        self._requested_at = time.monotonic()
        view.show([], f"requested the stack of rank {self.rank}")

    def _show_arrived_stack(self) -> None:
        """Show the stack once it is in the log, or after ``STACK_TIMEOUT_S`` that no answer came."""
        if self._request is None:
            return
        lines = self._request.answer()
        waited = time.monotonic() - self._requested_at
        if lines:
            at = time.strftime("%H:%M:%S")
            view = self.query_one(StackView)
            view.show(lines, f"rank {self.rank} at {at}")
            if waited > STACK_TIMEOUT_S / 3:
                self._request = None
        elif waited > STACK_TIMEOUT_S:
            self.query_one(StackView).show([], f"rank {self.rank} does not answer; it may be stopped")
            self._request = None
