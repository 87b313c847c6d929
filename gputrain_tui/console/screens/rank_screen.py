"""Rank screen: figures, charts and log of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.geometry import Region

from gputrain_tui.console.panel_container import (
    GAP_CELLS,
    MOST_PANELS,
    PanelContainer,
    grid_shape,
    layout_size,
    place_in_grid,
)
from gputrain_tui.console.screens.chart_screen import ChartScreen
from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Copyable
from gputrain_tui.console.widgets.collectives_view import CollectivesView
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.log_view import LogView
from gputrain_tui.console.widgets.rank_facts import RankFacts, facts, facts_height
from gputrain_tui.console.widgets.root_cause import RootCause, failure_text
from gputrain_tui.console.widgets.run_header import RunHeader

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun

CHART_IDS = ("loss", "sync", "step")


def arrange_rank(width: int, height: int, *, facts: int, below: str, in_groups: bool) -> dict[str, Region]:
    """Return the visible panels and their regions in an area.

    ``facts``: lines of the figures, which stand on top; ``below``: the panel shown last by its key, visible below them;
    ``in_groups``: whether the rank has collectives, which stand beside the log where there is room for both.
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
    charts, bottom = rest.split_horizontal(rest.height // 2)
    each = (width - 2 * GAP_CELLS) // 3
    placed = {
        name: Region(
            index * (each + GAP_CELLS), charts.y, each if index < 2 else width - 2 * (each + GAP_CELLS), charts.height
        )
        for index, name in enumerate(CHART_IDS)
    }
    if size == "wide" and (in_groups or below == "groups"):
        log, right = bottom.split_vertical(width // 2)
        groups = Region(right.x + GAP_CELLS, right.y, right.width - GAP_CELLS, right.height)
        return {"facts": top, **placed, "log": log, "groups": groups}
    return {"facts": top, **placed, "groups" if below == "groups" else "log": bottom}


class RankScreen(ChartScreen):
    """The rank screen."""

    PLACE = "rank"
    AUTO_FOCUS = ""
    EVERY_TICK = "log"
    BINDINGS: ClassVar[list[BindingType]] = [*SCROLL_KEYS]

    def __init__(self, live: LiveRun, rank: int) -> None:
        super().__init__(live)
        self.rank = rank
        self.choice = "loss"
        """The panel shown last by its key."""
        self._in_groups = False
        """Whether the panels are placed for a rank with collectives in process groups."""

    def compose(self) -> ComposeResult:
        live = self.live
        yield RunHeader(live, id="header")
        with PanelContainer(id="panels"):
            yield RankFacts(live, id="facts")
            yield self.band_chart("loss", id="loss")
            yield self.band_chart("sync_exposed_ms", id="sync")
            yield self.band_chart("step_ms", id="step")
            yield CollectivesView(live, self.rank, id="groups")
            yield LogView(live.run.dir, rank=self.rank, live=live, id="log")
        yield KeyBar(self.PLACE, over=lambda: live.over)

    def on_mount(self) -> None:
        self._highlight_rank(self.rank)
        self.place_panels()

    def tick(self) -> None:
        if self._in_groups != self._has_groups():
            self.place_panels()
        super().tick()

    def place_panels(self) -> None:
        width, height = self.panel_size
        count = len(facts(self.live.state, self.rank, 0.0))
        self._in_groups = self._has_groups()
        lines = facts_height(width, count)
        placed = arrange_rank(width, height, facts=lines, below=self.choice, in_groups=self._in_groups)
        self.query_one(PanelContainer).place(placed)

    def _has_groups(self) -> bool:
        view = self.live.state.ranks.get(self.rank)
        return view is not None and bool(view.groups.recent)

    # Actions

    def action_show(self, name: str) -> None:
        """Show a panel and focus it; in a narrow terminal, a second time shows the loss instead."""
        widget = self.query_one(f"#{name}")
        self.choice = "loss" if self.choice == name and layout_size(*self.app.size) == "narrow" else name
        self.place_panels()
        if widget.can_focus and widget.display:
            widget.focus()

    @property
    def _text(self) -> CollectivesView | LogView:
        """The text panel that keys scroll: the collectives if they were shown last, else the log."""
        groups = self.query_one(CollectivesView)
        return groups if groups.display and self.choice == "groups" else self.query_one(LogView)

    def action_scroll_by(self, lines: int) -> None:
        self._text.wheel(lines)

    def action_edge(self, side: int) -> None:
        self._text.action_edge(side)

    def copyable(self) -> Copyable | None:
        """Return the collectives if they were shown last, else the rank's failure, else a line of the log."""
        if self.choice == "groups" and (shown := self.query_one(CollectivesView).copyable()) is not None:
            return shown
        failure = self.live.state.rank(self.rank).failure
        if failure is not None:
            return Copyable(failure_text(RootCause(failure=failure)), "the failure")
        return self.query_one(LogView).copyable()

    def action_back(self) -> None:
        if not self.view_back():
            self.dismiss()

    def _go_to(self, rank: int) -> None:
        self.rank = rank
        self.query_one(LogView).show_rank(self.rank)
        self.query_one(CollectivesView).show_rank(self.rank)
        self._highlight_rank(self.rank)
        self.place_panels()

    def action_next_rank(self, step: int = 1) -> None:
        ranks = sorted(self.live.state.ranks)
        if ranks:
            index = ranks.index(self.rank) + step if self.rank in ranks else 0
            self._go_to(ranks[index % len(ranks)])

    def action_previous_rank(self) -> None:
        self.action_next_rank(-1)

    def action_next_flagged(self) -> None:
        flagged = sorted(self.live.state.flagged - {self.rank})
        if flagged:
            self._go_to(next((rank for rank in flagged if rank > self.rank), flagged[0]))

    def action_stack(self) -> None:
        """Ask the rank's process for its Python stack, and show it."""
        from gputrain_tui.console.screens.stacks_screen import StacksScreen

        self.app.push_screen(StacksScreen(self.live, rank=self.rank))
