"""Panels of Python stacks: of one rank, functions before files; and of all ranks, equal ones together."""

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
from trainer.contract.record import CodeFrame, ThreadStack


def frame_lines(frame: CodeFrame, width: int) -> list[str]:
    """Return a call in lines of ``width`` cells: function, file and line number; a long path loses its beginning."""
    name, file = printable(frame.function), f"{printable(frame.file)}:{frame.line}"
    left = width - len(name) - 2
    if left >= len(file):
        return [f"{name}  {file}"]
    if left > len(file.rpartition("/")[2]):
        return [f"{name}  …{file[len(file) - left + 1 :]}"]
    wrapped = [name[begin : begin + width] for begin in range(0, len(name), width)]
    return [*wrapped, "  " + (file if len(file) <= width - 2 else f"…{file[3 - width :]}")]


def stack_lines(threads: Sequence[ThreadStack], width: int) -> list[tuple[str, str]]:
    """Return stacks as pairs: a line of at most ``width`` cells and its style; the user's code stands out."""
    shown: list[tuple[str, str]] = []
    for number, thread in enumerate(threads):
        name = "main thread" if number == 0 else printable(thread.name) or f"other thread {number}"
        shown.append((name[:width], "accent"))
        for frame in thread.frames:
            shown += [(f"  {line}", "bright" if frame.user else "dim") for line in frame_lines(frame, width - 2)]
    return shown


class StackView(ScrolledText):
    """Panel of the newest stack of the rank."""

    PLACE = "text"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("text")]

    _threads: Sequence[ThreadStack] = ()
    _note = ""

    def show(self, threads: Sequence[ThreadStack], note: str = "") -> None:
        """Show stacks with a note in the title; without one, the note alone."""
        if (tuple(threads), note) != (self._threads, self._note):
            self._threads, self._note = tuple(threads), note
            self.redraw()

    def tick(self) -> None:
        """Do nothing: only ``show`` changes the panel."""

    def copyable(self) -> Copyable | None:
        lines = [text for text, _ in stack_lines(self._threads, width=1000)]
        return Copyable("\n".join(lines), "the stack") if lines else None

    def draw(self, width: int, height: int) -> list[Row]:
        note = self._note
        if not self._threads:
            text = note or "K asks the process for its Python stack"
            return [title_row(width, [("stack", "title")]), *centred_text(width, height - 1, [text])]
        title = title_row(width, [("stack", "title")], [[(note, "dim")]] if note else [])
        rows: list[Row] = [[(" ", "base"), line] for line in stack_lines(self._threads, width - 1)]
        return [title, *self.in_view(rows, height - 1)]


ROLES: dict[LineKind, str] = {"place": "accent", "user": "bright", "call": "dim", "note": "dim"}


class GroupsView(ScrolledText):
    """Panel of the stacks of all ranks, equal ones together, those of the fewest ranks first."""

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
