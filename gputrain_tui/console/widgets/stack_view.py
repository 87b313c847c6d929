"""Panel of a Python stack as ``faulthandler`` prints it, rearranged: main thread first, functions before files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from textual.binding import BindingType

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.tables import printable

HEADING = "(most recent call first)"
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<name>.+)')


class ThreadStack(NamedTuple):
    """Stack of one thread, the innermost call first."""

    heading: str
    frames: tuple[str, ...]


def thread_stacks(lines: Sequence[str]) -> list[ThreadStack]:
    """Return the threads of a stack, the main thread first; the first line that is not part of it ends it."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if HEADING in line:
            found.append((line, []))
        elif found and line.startswith("  "):
            found[-1][1].append(line)
        elif found and line.strip():
            break
    stacks = [ThreadStack(heading, tuple(frames)) for heading, frames in found]
    return stacks[-1:] + stacks[:-1]  # faulthandler prints the newest thread first; the main thread is the oldest


def heading_text(number: int, count: int) -> str:
    """Return the heading of a thread."""
    return "main thread" if number == 0 else f"other thread {number} of {count - 1}"


def frame_lines(frame: str, width: int) -> list[str]:
    """Return a call in lines of ``width`` cells: function, file and line number; a long path loses its beginning."""
    text = printable(frame)
    match = _FRAME.fullmatch(text)
    if match is None:
        return [text.strip()[:width]]
    name, place = match["name"], f"{match['file']}:{match['line']}"
    room = width - len(name) - 2
    if room >= len(place):
        return [f"{name}  {place}"]
    *_, last = place.rpartition("/")
    if room > len(last):
        return [f"{name}  …{place[len(place) - room + 1 :]}"]
    wrapped = [name[begin : begin + width] for begin in range(0, len(name), width)]
    return [*wrapped, "  " + (place if len(place) <= width - 2 else f"…{place[3 - width :]}")]


def stack_lines(lines: Sequence[str], width: int) -> list[tuple[str, bool]]:
    """Return a stack as pairs: a line of at most ``width`` cells, and whether it is the heading of a thread."""
    stacks = thread_stacks(lines)
    shown: list[tuple[str, bool]] = []
    for number, stack in enumerate(stacks):
        shown.append((heading_text(number, len(stacks)), True))
        shown += [(f"  {line}", False) for frame in stack.frames for line in frame_lines(frame, width - 2)]
    return shown


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
