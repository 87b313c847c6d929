"""Python stacks printed by ``faulthandler``, rearranged: main thread first, functions before files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

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
