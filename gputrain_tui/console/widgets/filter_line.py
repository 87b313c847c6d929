"""Input line of the rank filter, checked while it is typed."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input, Static

from gputrain_tui.console.widgets.line_input import LineInput
from gputrain_tui.console.widgets.rank_grid import RankGrid
from trainer.contract.errors import RequestError

HINT = "5  node3  rank:0-7  state:failed  late>5  !host:node1"


class FilterLine(Horizontal):
    """Input above the footer; Enter keeps the filter, Escape removes it."""

    DEFAULT_CSS = """
    FilterLine { dock: bottom; height: 1; margin-bottom: 1; background: $boost; display: none; }
    FilterLine.-open { display: block; }
    FilterLine > #mark { width: 9; padding: 0 1; color: $text-accent; }
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
        """Yield the input and its message."""
        yield Static("filter", id="mark")
        yield LineInput(compact=True)
        yield Static(HINT, id="hint", markup=False)

    def open(self) -> None:
        """Open the line on the filter in force."""
        self.add_class("-open")
        field = self.query_one(Input)
        field.value = self._grid.filter_text
        field.focus()

    def action_leave(self) -> None:
        """Remove the filter and close the line."""
        self._grid.set_filter("")
        self._close()

    def action_keep(self) -> None:
        """Keep the filter and close the line."""
        self._close()

    def _close(self) -> None:
        self.screen.set_focus(self._grid)
        self.remove_class("-open")

    def on_mount(self) -> None:
        """Watch the focus, to close the line when it moves."""
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
        self._close()
