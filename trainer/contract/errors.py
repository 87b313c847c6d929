"""Errors that a person can act on, told in one line; everything else is a defect and keeps its traceback."""

from __future__ import annotations

import difflib
import re
import sys
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


class NotKeptError(TrainingError):
    """All updates were made, but the checkpoint of the last one, or the best one, could not be written."""


LONGEST_QUOTE = 80
"""Characters that a message spends on a value that it refuses."""
LONGEST_WORD = 300
"""Characters of a key, a path or a host's name that a message gives whole."""


def printable(text: str) -> str:
    """Return the text with control characters made visible, so that printing it cannot command the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\t" else _visible(char) for char in text)


def printable_lines(text: str) -> str:
    """Return the text with all control characters but its line breaks and tabs made visible."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _visible(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # the pictures of control characters: ESC becomes ␛
    if code == 0x7F:
        return "\u2421"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def narrated(line: str, *, program: str) -> str:
    """Return a program's word to people as one line that can be printed, whatever it quotes."""
    return f"{program}: {printable(readable(line))}"


def narrate(line: str, *, program: str) -> None:
    """Write one line for people to standard error, whatever it quotes."""
    print(narrated(line, program=program), file=sys.stderr, flush=True)


def quoted(value: object) -> str:
    """Return how Python writes a value, without its middle where it is long: its ends tell which one is meant."""
    return _without_middle(repr(value), LONGEST_QUOTE)


def require_utf8(words: Iterable[str]) -> None:
    """Refuse words that no record, no plan and no other machine could be given as they are.

    Raises:
        RequestError: a word holds bytes that are not UTF-8.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{quoted(word)} is not UTF-8 text; name it in UTF-8") from None


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
