"""Errors that a person can act on, told in one line; everything else is a defect and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What a finished command tells the shell."""

    FINISHED = 0
    FAILED = 1
    """The training failed."""
    BAD_REQUEST = 2
    """The request was wrong; nothing was started."""
    REFUSED = 3
    """Preflight refused it."""
    STOPPED = 130
    """Stopped by the user."""


class RequestError(ValueError):
    """The request was wrong. The message is one line: what, where, what is allowed; exit code 2."""


class TrainingError(RuntimeError):
    """The training cannot go on, for a reason that needs no traceback; exit code 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
