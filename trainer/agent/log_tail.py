"""Finds the last error in the log of a process that ended without a report."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.contract.record.regular_file import read_part, size_of

TAIL_BYTES = 64 << 10
"""How much of the end of a log is searched."""
MESSAGE_LENGTH = 300
"""Longest message, in characters."""

_CARRIED = re.compile(r"Caught \S+ in (.+?)\.?$")
"""First line of an error that torch carries from another process or thread, before that one's traceback."""
_GROUP = re.compile(r"^(?:\[rank\d+\]:)?\[[EF]\S+ \S+ (?:\S+ )?(ProcessGroup\w+\.cpp:\d+\] .+)")
"""An error in torch's own log of a process group, which ends a process without an exception."""
_CPP = re.compile(r"^\s*what\(\):\s+(.+)|^(Fatal Python error: .+)")


def error_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message.

    For one that torch carries from a data loading process, return the error there.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and (carried := _CARRIED.match(lines[0])) and (inner := _last_error(lines[1:])):
        return f"{inner} (in {carried[1]})"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def last_error(log: Path | None, *, since: int = 0, any_line: bool = False) -> str:
    """Return the line that names the error of the last traceback, else of a process group, or an empty string.

    Args:
        log: the file; None where a rank prints to the terminal.
        since: size of the log before, in bytes.
        any_line: without a traceback, return the last line.
    """
    if log is None:
        return ""
    try:
        begin = max(since, size_of(log) - TAIL_BYTES)
        lines = read_part(log, begin, TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = _last_error(lines) or next((match[1] for line in reversed(lines) if (match := _GROUP.match(line))), "")
    if not found and any_line:
        found = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return found[:MESSAGE_LENGTH]


def _last_error(lines: list[str]) -> str:
    found, inside = "", False
    for line in lines:
        if line.removeprefix("Original ").startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line.strip() and not line[0].isspace():
            found, inside = line.strip(), False
        elif match := _CPP.match(line):
            found = (match[1] or match[2]).strip()
    return found
