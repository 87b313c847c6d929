"""Errors that a person can act on, told in one line; everything else is a defect and keeps its traceback."""

from __future__ import annotations

import difflib
import re
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


class CheckpointError(RequestError):
    """A checkpoint cannot be used; one line that names the file."""


class RecordError(RequestError):
    """A file of a run directory cannot be used; one line that names it."""


class TrainingError(RuntimeError):
    """The training cannot go on, for a reason that needs no traceback; exit code 1."""


LONGEST_QUOTE = 80
"""Characters that a message spends on a value that it refuses."""
LONGEST_WORD = 300
"""Characters of a key, a path or a host's name that a message gives whole."""


def quoted(value: object) -> str:
    """Return how Python writes a value, without its middle where it is long: its ends tell which one is meant."""
    return _without_middle(repr(value), LONGEST_QUOTE)


def readable(line: str) -> str:
    """Return a message without the middle of words that are longer than any path that somebody would read."""
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_QUOTE), line)


def _without_middle(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 1]}…{text[-end:]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
