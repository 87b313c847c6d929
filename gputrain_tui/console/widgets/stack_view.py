"""The Python stack of a rank's process, as it told it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.ramp import Ramp
from gputrain_tui.console.widgets.drawing import Row, cut, headline, message
from gputrain_tui.console.widgets.panel import Live, Panel
from gputrain_tui.tables import printable


def draw_stack(lines: Sequence[str], remark: str, width: int, height: int, top: int = 0) -> list[Row]:
    """Return a stack as ``height`` rows of ``width`` cells."""
    rows = [cut(headline(width, [("stack", "title")], [[(remark, "dim")]] if remark and lines else []), width)]
    if not lines:
        return rows + message(width, height - 1, [remark or "k asks the process for its Python stack"])
    for line in lines[top : top + height - 1]:
        text = printable(line)
        heading = "most recent call first" in text
        rows.append(cut([(" ", "base"), (text, "accent" if heading else "bright")], width))
    return rows + [cut([], width) for _ in range(height - len(rows))]


class StackView(Panel, can_focus=True):
    """Shows the newest answer."""

    BINDINGS: ClassVar[list[BindingType]] = [("up", "scroll_by(-1)", "Up"), ("down", "scroll_by(1)", "Down"),
                ("pageup", "scroll_by(-20)", "Page up"), ("pagedown", "scroll_by(20)", "Page down")]  # fmt: skip

    def __init__(self, live: Live, *, id: str | None = None) -> None:
        super().__init__(live, id=id)
        self._lines: list[str] = []
        self._remark = ""
        self._top = 0

    def show(self, lines: Sequence[str], remark: str = "") -> None:
        """Show an answer, or say why there is none."""
        if (list(lines), remark) != (self._lines, self._remark):
            self._lines, self._remark = list(lines), remark
            self._top = min(self._top, max(len(self._lines) - 1, 0))
            self.redraw()

    def action_scroll_by(self, lines: int) -> None:
        """Move through a stack that is longer than the panel."""
        self._top = min(max(self._top + lines, 0), max(len(self._lines) - self.size.height + 1, 0))
        self.redraw()

    def seen_version(self) -> object:
        """The run does not move it."""
        return None

    def draw(self, width: int, height: int, ramp: Ramp) -> list[Row]:
        """Return the stack."""
        return draw_stack(self._lines, self._remark, width, height, self._top)
