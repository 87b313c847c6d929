"""Panel of a rank's Python stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.stack_text import stack_lines
from gputrain_tui.tables import printable


def draw_stack(lines: Sequence[str], remark: str, width: int, height: int, top: int = 0) -> list[Row]:
    """Return a stack, scrolled to line ``top``, as ``height`` rows of ``width`` cells."""
    rows = [fit_row(title_row(width, [("stack", "title")], [[(remark, "dim")]] if remark and lines else []), width)]
    if not lines:
        return rows + centred_text(width, height - 1, [remark or "K asks the process for its Python stack"])
    for text, is_heading in stack_lines(lines, width - 1)[top : top + height - 1]:
        rows.append(fit_row([(" ", "base"), (text, "accent" if is_heading else "bright")], width))
    return rows + [fit_row([], width) for _ in range(height - len(rows))]


class StackView(Panel, can_focus=True):
    """Panel of the newest stack of the rank."""

    PLACE = "text"
    """Name of the panel in the action table."""
    BINDINGS: ClassVar[list[BindingType]] = [*SCROLL_KEYS, *bindings("text")]

    _lines: Sequence[str] = ()
    _remark = ""
    _top = 0

    def show(self, lines: Sequence[str], remark: str = "") -> None:
        """Show a stack with a remark in the title; without lines, the remark alone."""
        if (tuple(lines), remark) != (self._lines, self._remark):
            self._lines, self._remark = tuple(lines), remark
            self._top = min(self._top, max(len(self._lines) - 1, 0))
            self.redraw()

    def action_scroll_by(self, lines: int) -> None:
        """Scroll the stack."""
        count = len(stack_lines(self._lines, self.size.width - 1))
        self._top = min(max(self._top + lines, 0), max(count - self.size.height + 1, 0))
        self.redraw()

    def action_edge(self, side: int) -> None:
        """Go to the first or the last line."""
        self.action_scroll_by(side * len(stack_lines(self._lines, self.size.width - 1)))

    def wheel(self, lines: int) -> None:
        """Scroll the stack."""
        self.action_scroll_by(lines)

    def copyable(self) -> Copyable | None:
        """Return the whole stack."""
        return Copyable("\n".join(map(printable, self._lines)), "the stack") if self._lines else None

    def seen_version(self) -> object:
        """Return None: only ``show`` changes the panel."""
        return None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the stack."""
        return draw_stack(self._lines, self._remark, width, height, self._top)
