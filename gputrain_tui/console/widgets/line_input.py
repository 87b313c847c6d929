"""Lines of input, with a label or as a filter; pasted text is taken whole, or not at all."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Paste
from textual.widget import Widget
from textual.widgets import Input, Static

from gputrain_tui.console.widgets.rank_grid import RankGrid
from trainer.contract.errors import RequestError


class LineInput(Input):
    """Input line; Textual's own keeps the first line of a pasted block and drops the rest without a word."""

    def on_paste(self, event: Paste) -> None:
        """Insert a pasted line in place of the selection; refuse several."""
        event.prevent_default()
        event.stop()
        # A shell continues a line that ends in a backslash; terminals send a carriage return for a line's end.
        lines = re.sub(r"\\(\r\n|\r|\n)", " ", event.text).strip("\r\n").splitlines()
        if len(lines) > 1:
            self.app.bell()
            text = f"not pasted: it has {len(lines):,} lines, and this line takes one"
            self.notify(text, severity="error", markup=False)
        elif lines:
            self.replace(lines[0], *self.selection)


class PromptLine(Horizontal):
    """Label and input; Tab calls ``action_commit`` of the screen, Enter posts ``Input.Submitted``."""

    DEFAULT_CSS = """
    PromptLine { height: 1; background: $surface; display: none; }
    PromptLine.-open { display: block; }
    PromptLine > #label { width: auto; max-width: 50%; padding: 0 1 0 0; color: $text-accent; }
    PromptLine > #editor { width: 1fr; height: 1; background: $surface; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "screen.commit(1)", "Commit", show=False),
        Binding("shift+tab", "screen.commit(-1)", "Commit", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield Static(id="label", markup=False)
        yield LineInput(id="editor", compact=True)

    def open(self, label: str, text: str, hint: str) -> None:
        self.add_class("-open")
        self.query_one("#label", Static).update(label)
        editor = self.query_one(Input)
        editor.value = text
        editor.placeholder = hint
        editor.focus()

    def close(self) -> None:
        self.remove_class("-open")


HINT = "5  node3  rank:0-7  state:failed  late>5  !host:node1"


class FilterLine(Horizontal):
    """Input above the footer; Enter keeps the filter, Escape removes it."""

    DEFAULT_CSS = """
    FilterLine { dock: bottom; height: 1; margin-bottom: 1; background: $boost; display: none; }
    FilterLine.-open { display: block; }
    FilterLine > #label { width: 9; padding: 0 1; color: $text-accent; }
    FilterLine > Input { width: 1fr; border: none; height: 1; padding: 0; background: transparent; }
    FilterLine > #hint { width: auto; max-width: 60%; padding: 0 1; color: $foreground 60%; }
    FilterLine > #hint.-wrong { color: $text-warning; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Clear", show=False),
        Binding("tab,shift+tab", "keep", "Keep", show=False),
    ]

    def __init__(self, grid: RankGrid) -> None:
        super().__init__()
        self._grid = grid

    def compose(self) -> ComposeResult:
        yield Static("filter", id="label")
        yield LineInput(compact=True)
        yield Static(HINT, id="hint", markup=False)

    def open(self) -> None:
        self.add_class("-open")
        field = self.query_one(Input)
        field.value = self._grid.filter_text
        field.focus()

    def action_leave(self) -> None:
        self._grid.set_filter("")
        self.action_keep()

    def action_keep(self) -> None:
        self.screen.set_focus(self._grid)
        self.remove_class("-open")

    def on_mount(self) -> None:
        self.watch(self.screen, "focused", self._focus_moved, init=False)

    def _focus_moved(self, focused: Widget | None) -> None:
        """Close the line when a click moves the focus: letters typed there would be commands."""
        if focused is not None and focused.parent is not self:
            self.remove_class("-open")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        hint = self.query_one("#hint", Static)
        try:
            self._grid.set_filter(event.value)
        except RequestError as error:
            hint.update(str(error))
            hint.add_class("-wrong")
        else:
            hint.update(HINT)
            hint.remove_class("-wrong")

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_keep()
