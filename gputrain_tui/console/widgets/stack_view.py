"""Panel of a Python stack as ``faulthandler`` prints it, rearranged: main thread first, functions before files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, title_row
from gputrain_tui.console.widgets.panel import ScrolledText
from gputrain_tui.tables import printable

HEADING = "(most recent call first)"
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<name>.+)')


def thread_stacks(lines: Sequence[str]) -> list[list[str]]:
    """Return the calls of each thread, the main thread first; the first line that is not part of a stack ends it."""
    threads: list[list[str]] = []
    for line in lines:
        if HEADING in line:
            threads.append([])
        elif threads and line.startswith("  "):
            threads[-1].append(line)
        elif threads and line.strip():
            break
    return threads[-1:] + threads[:-1]  # faulthandler prints the newest thread first; the main thread is the oldest


def frame_lines(frame: str, width: int) -> list[str]:
    """Return a call in lines of ``width`` cells: function, file and line number; a long path loses its beginning."""
    text = printable(frame)
    match = _FRAME.fullmatch(text)
    if match is None:
        return [text.strip()[:width]]
    name, source = match["name"], f"{match['file']}:{match['line']}"
    free = width - len(name) - 2
    if free >= len(source):
        return [f"{name}  {source}"]
    *_, last = source.rpartition("/")
    if free > len(last):
        return [f"{name}  …{source[len(source) - free + 1 :]}"]
    wrapped = [name[begin : begin + width] for begin in range(0, len(name), width)]
    return [*wrapped, "  " + (source if len(source) <= width - 2 else f"…{source[3 - width :]}")]


def stack_lines(lines: Sequence[str], width: int) -> list[tuple[str, bool]]:
    """Return a stack as pairs: a line of at most ``width`` cells, and whether it is the heading of a thread."""
    stacks = thread_stacks(lines)
    shown: list[tuple[str, bool]] = []
    for number, frames in enumerate(stacks):
        shown.append((f"other thread {number} of {len(stacks) - 1}" if number else "main thread", True))
        shown += [(f"  {line}", False) for frame in frames for line in frame_lines(frame, width - 2)]
    return shown


class StackView(ScrolledText):
    """Panel of the newest stack of the rank."""

    PLACE = "text"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("text")]

    _lines: Sequence[str] = ()
    _note = ""

    def show(self, lines: Sequence[str], note: str = "") -> None:
        """Show a stack with a note in the title; without lines, the note alone."""
        if (tuple(lines), note) != (self._lines, self._note):
            self._lines, self._note = tuple(lines), note
            self.redraw()

    def tick(self) -> None:
        """Do nothing: only ``show`` changes the panel."""

    def copyable(self) -> Copyable | None:
        return Copyable("\n".join(map(printable, self._lines)), "the stack") if self._lines else None

    def draw(self, width: int, height: int) -> list[Row]:
        note = self._note
        if not self._lines:
            text = note or "K asks the process for its Python stack"
            return [title_row(width, [("stack", "title")]), *centred_text(width, height - 1, [text])]
        title = title_row(width, [("stack", "title")], [[(note, "dim")]] if note else [])
        rows: list[Row] = [
            [(" ", "base"), (text, "accent" if is_heading else "bright")]
            for text, is_heading in stack_lines(self._lines, width - 1)
        ]
        return [title, *self.in_view(rows, height - 1)]
