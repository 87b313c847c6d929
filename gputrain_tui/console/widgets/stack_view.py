"""Panel of a rank's Python stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.tables import printable


def draw_stack(lines: Sequence[str], remark: str, width: int, height: int, top: int = 0) -> list[Row]:
    """Return a stack as ``height`` rows of ``width`` cells."""
    rows = [fit_row(title_row(width, [("stack", "title")], [[(remark, "dim")]] if remark and lines else []), width)]
    if not lines:
        return rows + centred_text(width, height - 1, [remark or "k asks the process for its Python stack"])
    for line in lines[top : top + height - 1]:
        text = printable(line)
        heading = "most recent call first" in text
        rows.append(fit_row([(" ", "base"), (text, "accent" if heading else "bright")], width))
    return rows + [fit_row([], width) for _ in range(height - len(rows))]


class StackView(Panel, can_focus=True):
    """The newest stack of the rank."""

    BINDINGS: ClassVar[list[BindingType]] = [("up", "scroll_by(-1)", "Up"), ("down", "scroll_by(1)", "Down"),
                ("pageup", "scroll_by(-20)", "Page up"), ("pagedown", "scroll_by(20)", "Page down")]  # fmt: skip

    _lines: Sequence[str] = ()
    _remark = ""
    _top = 0

    def show(self, lines: Sequence[str], remark: str = "") -> None:
        """Show a stack, or why there is none."""
        if (tuple(lines), remark) != (self._lines, self._remark):
            self._lines, self._remark = tuple(lines), remark
            self._top = min(self._top, max(len(self._lines) - 1, 0))
            self.redraw()

    def action_scroll_by(self, lines: int) -> None:
        """Scroll the stack."""
        self._top = min(max(self._top + lines, 0), max(len(self._lines) - self.size.height + 1, 0))
        self.redraw()

    def seen_version(self) -> object:
        """Change with the stack only."""
        return None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the stack."""
        return draw_stack(self._lines, self._remark, width, height, self._top)
