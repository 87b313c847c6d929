"""Panel of a rank's Python stacks: main thread first, the innermost call first, functions before files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, title_row
from gputrain_tui.console.widgets.panel import Panel
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


def draw_stack(threads: Sequence[ThreadStack], remark: str, width: int, height: int, top: int = 0) -> list[Row]:
    """Return stacks, scrolled to line ``top``, as ``height`` rows of ``width`` cells."""
    rows = [fit_row(title_row(width, [("stack", "title")], [[(remark, "dim")]] if remark and threads else []), width)]
    if not threads:
        return rows + centred_text(width, height - 1, [remark or "K asks the process for its Python stack"])
    for text, style in stack_lines(threads, width - 1)[top : top + height - 1]:
        rows.append(fit_row([(" ", "base"), (text, style)], width))
    return rows + [fit_row([], width) for _ in range(height - len(rows))]


class StackView(Panel, can_focus=True):
    """Panel of the newest stack of the rank."""

    PLACE = "text"
    """Name of the panel in the action table."""
    BINDINGS: ClassVar[list[BindingType]] = [*SCROLL_KEYS, *bindings("text")]

    _threads: Sequence[ThreadStack] = ()
    _remark = ""
    _top = 0

    def show(self, threads: Sequence[ThreadStack], remark: str = "") -> None:
        """Show stacks with a remark in the title; without one, the remark alone."""
        if (tuple(threads), remark) != (self._threads, self._remark):
            self._threads, self._remark, self._top = tuple(threads), remark, 0
            self.redraw()

    def action_scroll_by(self, lines: int) -> None:
        """Scroll the stack."""
        count = len(stack_lines(self._threads, self.size.width - 1))
        self._top = min(max(self._top + lines, 0), max(count - self.size.height + 1, 0))
        self.redraw()

    def action_edge(self, side: int) -> None:
        """Go to the first or the last line."""
        self.action_scroll_by(side * len(stack_lines(self._threads, self.size.width - 1)))

    def wheel(self, lines: int) -> None:
        """Scroll the stack."""
        self.action_scroll_by(lines)

    def copyable(self) -> Copyable | None:
        """Return the whole stack."""
        return (
            Copyable("\n".join(text for text, _ in stack_lines(self._threads, 1000)), "the stack")
            if self._threads
            else None
        )

    def seen_version(self) -> object:
        """Return None: only ``show`` changes the panel."""
        return None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the stack."""
        return draw_stack(self._threads, self._remark, width, height, self._top)
