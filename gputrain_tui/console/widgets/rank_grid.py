"""Rank table with cursor, sorting and filter; only visible lines are formatted, so that 1,024 ranks stay cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from gputrain_tui.console.widgets.canvas import MOVE_KEYS, role_classes
from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.rank_columns import (
    BY_KEY,
    PlacedColumn,
    RankRow,
    goes_down,
    latest_of_groups,
    layout,
    rank_filter,
    rate_in_steps,
    sort_ranks,
)
from gputrain_tui.console.widgets.rank_table import HEAD_LINES, GridView, draw_grid, visible_ranks
from gputrain_tui.state import RankView
from gputrain_tui.state.finding_text import named_ranks
from gputrain_tui.state.process_groups import ProcessGroup, parts_by_name

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun

SORT_INTERVAL_S = 0.5
"""Least seconds between two sorts, so that lines do not jump too fast to be followed."""


class RankGrid(Panel, can_focus=True):
    """Rank table with cursor by keys and mouse, sorting by any column, and a filter."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(
        "column", "value", "quiet", "absent", "error-text", "cursor", "cursor-unfocused"
    )

    DEFAULT_CSS = """
    RankGrid > .canvas--column { color: $foreground 60%; text-style: bold; }
    RankGrid > .canvas--value { color: $foreground 72%; }
    RankGrid > .canvas--quiet { color: $foreground 50%; }
    RankGrid > .canvas--absent { color: $foreground 30%; }
    RankGrid > .canvas--error-text { color: $foreground 60%; }
    RankGrid:light > .canvas--quiet { color: $foreground 62%; }
    RankGrid:light > .canvas--absent { color: $foreground 40%; }
    RankGrid:ansi > .canvas--quiet, RankGrid:ansi > .canvas--absent { text-style: dim; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [*MOVE_KEYS, Binding("enter", "open", "Open the rank", show=False)]

    @dataclass
    class Picked(Message):
        """The cursor moved to a rank."""

        rank: int

        def can_replace(self, message: Message) -> bool:
            """Let a later move replace this one."""
            return isinstance(message, RankGrid.Picked)

    @dataclass
    class Opened(Message):
        """The rank screen was requested for a rank."""

        rank: int

    def __init__(self, live: LiveRun, *, now: Callable[[], float] = monotonic, id: str | None = None) -> None:
        super().__init__(live, id=id)
        self.sort_key = "rank"
        self.descending = False
        self._now = now
        self._top = 0
        self._filter = rank_filter()
        self._one_of_each = ""
        """Process groups of which one rank each is shown; empty: all ranks are."""
        self._arranged: list[RankView] = []
        self._arranged_at = -SORT_INTERVAL_S
        self._arranged_version: object = None
        self._warned: set[int] = set()
        self._hosts: set[str] = set()
        self._standing_still = False
        self._scrolled = False
        """Whether the user has scrolled: flagged ranks are not brought into view then."""
        self._cursor_in_view = False
        """Whether the cursor was in view at the last drawing, and is kept there."""

    # Called by the screen

    @property
    def filter_text(self) -> str:
        return self._filter.text

    def sort_by(self, key: str, *, descending: bool | None = None) -> None:
        """Sort by a column; by the same one again in the other direction."""
        if descending is None:
            descending = not self.descending if key == self.sort_key else goes_down(key)
        self.sort_key, self.descending = key, descending
        self._rearrange()

    def sort_next(self) -> None:
        """Sort by the next visible column."""
        keys = [placed.column.key for placed in self._columns()] or list(BY_KEY)  # a hidden table has no visible column
        key = keys[(keys.index(self.sort_key) + 1) % len(keys) if self.sort_key in keys else 0]
        self.sort_by(key, descending=goes_down(key))

    def set_filter(self, text: str) -> None:
        """Show only the ranks that a filter line keeps.

        Raises:
            RequestError: the line cannot be parsed; the filter in force stays.
        """
        self._filter = rank_filter(text)
        self._rearrange()

    def show_one_of_each(self) -> bool:
        """Show one rank of each group of the next name, after the last name all ranks; return whether there is one."""
        names = ["", *self._parts()]
        before = names.index(self._one_of_each) if self._one_of_each in names else 0
        self._one_of_each = names[(before + 1) % len(names)]
        self._rearrange()
        return len(names) > 1

    def _parts(self) -> dict[str, list[ProcessGroup]]:
        ranks = self.live.state.ranks
        groups = (group for view in ranks.values() for group in view.groups.by_name.values())
        return parts_by_name(groups, len(ranks))

    # Cursor

    def action_move(self, lines: int) -> None:
        index = self._cursor_index()
        if index is None:
            self._pick(self._top if lines > 0 else 0)
        else:
            self._pick(index + lines)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(visible_ranks(self.size.height) - 1, 1))

    def action_edge(self, side: int) -> None:
        self._pick(0 if side < 0 else len(self._arranged) - 1)

    def action_open(self) -> None:
        """Request the rank screen for the rank under the cursor, or for the first visible one."""
        if self.selected_rank is None and self._arranged:
            self._pick(self._top)
        if self.selected_rank is not None:
            self.post_message(self.Opened(self.selected_rank))

    def show_rank(self, rank: int | None) -> None:
        self.selected_rank = rank
        index = self._cursor_index()
        if index is not None:
            self._reveal(index)

    def bring_into_view(self, rank: int) -> None:
        """Scroll to a flagged rank, unless the user has selected a rank or scrolled."""
        index = self._index_of(rank)
        if index is not None and self.selected_rank is None and not self._scrolled:
            self._reveal(index)
            self.redraw()

    def _pick(self, index: int) -> None:
        if not self._arranged:
            return
        index = min(max(index, 0), len(self._arranged) - 1)
        self._selected_rank = self._arranged[index].rank
        self._reveal(index)
        self.redraw()
        self.post_message(self.Picked(self._selected_rank))

    def _cursor_index(self) -> int | None:
        return self._index_of(self.selected_rank)

    def _index_of(self, rank: int | None) -> int | None:
        return next((i for i, view in enumerate(self._arranged) if view.rank == rank), None)

    def _reveal(self, index: int) -> None:
        visible = max(visible_ranks(self.size.height), 1)
        self._scroll(min(max(self._top, index - visible + 1), index))

    def _scroll(self, top: int) -> None:
        self._top = min(max(top, 0), max(len(self._arranged) - visible_ranks(self.size.height), 0))

    # Mouse

    def _scroll_away(self, top: int) -> None:
        """Scroll, also if the cursor goes out of view."""
        self._cursor_in_view = False
        self._scroll(top)
        self.redraw()

    def wheel(self, lines: int) -> None:
        self._scrolled = True
        self._scroll_away(self._top + lines)

    def on_click(self, event: events.Click) -> None:
        x, y = event.get_content_offset_capture(self)
        visible = visible_ranks(self.size.height)
        if y == HEAD_LINES - 1:
            placed = next((p for p in self._columns() if p.begin - 1 <= x < p.end), None)
            if placed is not None:
                self.sort_by(placed.column.key)
        elif y >= HEAD_LINES and x == self.size.width - 1 and len(self._arranged) > visible:
            self._scroll_away(round((y - HEAD_LINES) / max(visible - 1, 1) * (len(self._arranged) - visible)))
        elif y >= HEAD_LINES and self._top + y - HEAD_LINES < len(self._arranged):
            self._pick(self._top + y - HEAD_LINES)
            if event.chain == 2:
                self.action_open()

    # Drawing

    def seen_version(self) -> object:
        return self.live.version

    def tick(self) -> None:
        """Redraw also if the run began or ceased to stand still."""
        if self.stands_still != self._standing_still and self.display and self.size:
            self.redraw()
        else:
            super().tick()

    def draw(self, width: int, height: int) -> list[Row]:
        now = self._now()
        self._standing_still = self.stands_still
        if now - self._arranged_at >= SORT_INTERVAL_S and self.live.version != self._arranged_version:
            self._arrange(now)
        index = self._cursor_index()
        if index is not None and self._cursor_in_view:
            self._reveal(index)  # the order or the height changed
        self._scroll(self._top)
        self._cursor_in_view = index is not None and self._top <= index < self._top + visible_ranks(height)
        return draw_grid(
            GridView(
                rows=self._arranged,
                ranks=len(self.live.state.ranks),
                late=self.live.state.lateness(),
                in_steps=rate_in_steps(self.live.state.ranks.values()),
                balanced=self.live.state.shares.newest is not None,
                span=self.live.state.span,
                warned=self._warned,
                top=self._top,
                cursor=self.selected_rank,
                focused=self.has_focus,
                sort_key=self.sort_key,
                descending=self.descending,
                filter_text=self._filter.text,
                one_of_each=self._one_of_each,
                hosts=self._hosts,
                failing=self.live.state.root_cause is not None,
                standing_still=self._standing_still,
                ended=self.live.end_text,
            ),
            width,
            height,
        )

    def _rearrange(self) -> None:
        self._arrange(self._now())
        index = self._cursor_index()
        if index is not None:
            self._reveal(index)
        self.redraw()

    def _arrange(self, now: float) -> None:
        """Filter and sort the ranks."""
        state, late = self.live.state, self.live.state.lateness()
        self._arranged_at, self._arranged_version = now, self.live.version
        self._warned = named_ranks(state.findings.values())
        self._hosts = {view.host for view in state.ranks.values() if view.host}
        in_steps = rate_in_steps(state.ranks.values())
        still, ended = self.stands_still, self.live.end_text
        ranks = (RankRow(view, late.get(rank), in_steps, still, ended) for rank, view in state.ranks.items())
        kept = [row.view for row in ranks if self._filter.keeps(row)]
        if groups := self._one_of_each and self._parts().get(self._one_of_each):
            kept = latest_of_groups(kept, groups, late, self._warned)
        self._arranged = sort_ranks(kept, late, self.sort_key, descending=self.descending)

    def _columns(self) -> list[PlacedColumn]:
        width, height = self.size
        scrolls = len(self._arranged) > visible_ranks(height)
        state = self.live.state
        balanced = state.shares.newest is not None
        return layout(width - (2 if scrolls else 1), len(state.ranks), self._hosts, balanced=balanced)
