"""The last error in the log of a process that ended without a report."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.contract.record.regular_file import read_part, size_of

_RERAISED = re.compile(r"Caught \S+ in (.+?)\.?$")
"""First line of an error that torch re-raises from another process or thread, before the original traceback."""
_GROUP = re.compile(r"^(?:\[rank\d+\]:)?\[[EF]\S+ \S+ (?:\S+ )?(ProcessGroup\w+\.cpp:\d+\] .+)")
"""Error line of a process group in torch's own log; such an error ends the process without an exception."""
_CPP = re.compile(r"^\s*what\(\):\s+(.+)|^(Fatal Python error: .+)")


def error_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message.

    For an error that torch re-raises from a data loading process, return the original error.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and (reraised := _RERAISED.match(lines[0])) and (original := _last_error(lines[1:])):
        return f"{original} (in {reraised[1]})"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def last_error(log: Path | None, *, since: int = 0, any_line: bool = False) -> str:
    """Return the last line of the last traceback, else the last error of a process group, else an empty string.

    Args:
        log: the file; None if the rank prints to the terminal.
        since: byte from which to search: the size of the log at the rank's start.
        any_line: without an error, return the last line that is not blank.
    """
    if log is None:
        return ""
    tail_bytes = 64 << 10  # bytes at the end of a log that are searched
    try:
        begin = max(since, size_of(log) - tail_bytes)
        lines = read_part(log, begin, tail_bytes).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = _last_error(lines) or next((match[1] for line in reversed(lines) if (match := _GROUP.match(line))), "")
    if not found and any_line:
        found = next((line.strip() for line in reversed(lines) if line.strip()), "")
    message_length = 300  # maximum length of a message, in characters
    return found[:message_length]


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
