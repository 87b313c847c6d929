"""Failure of a rank: from the exception that ended it, or from the last error in its log."""

from __future__ import annotations

import re
import time
import traceback
from pathlib import Path

from trainer.contract.outcome import SOCKET_NOTE
from trainer.contract.record import Failure
from trainer.contract.record.regular_file import read_part, size_of

_RERAISED = re.compile(r"(?:Caught \S+ in (.+?)\.?|-- (Process \d+) terminated with the following error:)$")
"""First line of an error that torch re-raises from another process or thread, before the original traceback."""
_GROUP = re.compile(r"^(?:\[rank\d+\]:)?\[[EF]\S+ \S+ (?:\S+ )?(ProcessGroup\w+\.cpp:\d+\] .+)")
"""Error line of a process group in torch's own log; such an error ends the process without an exception."""
_CPP = re.compile(r"^\s*what\(\):\s+(.+)|^(Fatal Python error: .+)")


def failure_of(
    error: BaseException,
    *,
    kind: str,
    rank: int,
    host: str,
    step: int | None = None,
    in_step: int | None = None,
    message: str = "",
    defect: bool = True,
) -> Failure:
    """Return the exception of a rank as a failure.

    Args:
        error: the exception.
        kind: one of ``Failure.kind``.
        rank: the rank that raised it.
        host: its machine.
        step: optimizer steps done; where a number is not finite, the step in which it is.
        in_step: the step that the rank was making.
        message: one line; by default the exception's class and the first line of its message.
        defect: whether to keep the traceback; not for an error that a person can act on.
    """
    return Failure(
        time=time.time(),
        kind=kind,
        message=message or error_line(error),
        rank=rank,
        host=host,
        step=step,
        in_step=in_step,
        traceback="".join(traceback.format_exception(error)) if defect else None,
    )


def error_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message.

    For an error that torch re-raises from a data loading process, return the original error.
    """
    lines = [line for line in text_of(error).splitlines() if line.strip()]
    if lines and (reraised := _RERAISED.match(lines[0])) and (original := _last_error(lines[1:])):
        return f"{original} (in {reraised[1] or reraised[2].lower()})"
    name = type(error).__name__
    if name == "BdbQuit" and not lines:  # of the standard library, whose debugger found the end of its input
        return "BdbQuit: breakpoint() needs a terminal, and a rank has none; attach a debugger such as debugpy instead"
    return f"{name}: {lines[0]}" if lines else name


def text_of(error: BaseException) -> str:
    """Return the message of an exception, also of a class of the user's whose ``__str__`` fails."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - any error of the user's own code
        return f"its __str__ raises {type(failed).__name__}"


def last_error(log: Path | None, *, since: int = 0, any_line: bool = False) -> str:
    """Return the last line of the last traceback, else the last error of a process group, else an empty string.

    Args:
        log: the file; None if the rank prints to the terminal.
        since: byte from which to search: the size of the log at the rank's start.
        any_line: without an error, return the last line that is neither blank nor torch's note on a connection.
    """
    if log is None:
        return ""
    tail_bytes = 64 << 10  # bytes at the end of a log that are searched
    try:
        begin = max(since, size_of(log) - tail_bytes)
        lines = read_part(log, begin, tail_bytes).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    error = _last_error(lines) or next((match[1] for line in reversed(lines) if (match := _GROUP.match(line))), "")
    if not error and any_line:
        said = (line.strip() for line in reversed(lines))
        error = next((line for line in said if line and not SOCKET_NOTE.match(line)), "")
    max_message_chars = 300
    return error[:max_message_chars]


def _last_error(lines: list[str]) -> str:
    error, inside = "", False
    for line in lines:
        if line.removeprefix("Original ").startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line.strip() and not line[0].isspace():
            error, inside = line.strip(), False
        elif match := _CPP.match(line):
            error = (match[1] or match[2]).strip()
    return error
