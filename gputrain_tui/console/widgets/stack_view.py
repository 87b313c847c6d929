"""Panel of Python stacks, equal ones together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, title_row, wrap_text
from gputrain_tui.console.widgets.panel import ScrolledText
from gputrain_tui.state.rank_stacks import LineKind, StackGroup, group_lines
from gputrain_tui.tables import printable

ROLES: dict[LineKind, str] = {"place": "accent", "user": "bright", "call": "dim", "note": "dim"}


class GroupsView(ScrolledText):
    """Panel of the stacks of ranks, equal ones together, those of the fewest ranks first."""

    PLACE = "text"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("text")]

    _groups: Sequence[StackGroup] = ()
    _note = ""
    _threads = False

    def show_groups(self, groups: Sequence[StackGroup], note: str) -> None:
        """Show groups with a note in the title; without any, the note alone."""
        if (groups, note) != (self._groups, self._note):
            self._groups, self._note = groups, note
            self.redraw()

    def toggle_threads(self) -> None:
        """Show the threads beside the main one, or hide them."""
        self._threads = not self._threads
        self.redraw()

    def copyable(self) -> Copyable | None:
        lines = [
            line
            for group in group_lines(self._groups, threads=self._threads, key="t")
            for line, _ in [*group, ("", "note")]
        ]
        return Copyable("\n".join(lines), "the stacks") if lines else None

    def draw(self, width: int, height: int) -> list[Row]:
        if not self._groups:
            return [title_row(width, [("stacks", "title")]), *centred_text(width, height - 1, [self._note])]
        rows: list[Row] = []
        groups = list(group_lines(self._groups, threads=self._threads, key="t"))
        overview = [[group[0] for group in groups]] if len(groups) > 1 else []
        for lines in overview + groups:
            for text, kind in lines:
                rows += [[(" ", "base"), (line, ROLES[kind])] for line in wrap_text(printable(text), width - 1)]
            rows.append([])
        title = title_row(width, [("stacks", "title")], [[(self._note, "dim")]])
        return [title, *self.in_view(rows, height - 1)]
