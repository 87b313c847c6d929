"""Errors that a user can act on, one line each; any other exception is a defect and keeps its traceback."""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command."""

    FINISHED = 0
    """Finished: the work is whole and kept."""
    FAILED = 1
    """The training failed, or the command: a host did not answer, an output could not be written."""
    BAD_REQUEST = 2
    """The request was wrong, in one line that names what and where; nothing was started."""
    REFUSED = 3
    """Preflight refused it: data missing, a port or a GPU busy, a stale rendezvous file."""
    STOPPED = 130
    """Stopped, by the user or by Slurm at a time limit or scancel; a checkpoint is saved first."""


BROKEN_PIPE_CODE = 128 + signal.SIGPIPE
"""Exit code after the reader of standard output has closed the pipe, as of a program that SIGPIPE kills."""


class RequestError(ValueError):
    """The request is wrong; exit code 2."""


class MachineNotReadyError(RequestError):
    """The request is right, but this machine is not ready for it; exit code 3."""


class CheckpointError(RequestError):
    """A checkpoint cannot be used; the message names the file."""


class RecordError(RequestError):
    """A file of a run directory cannot be used; the message names it."""


class TrainingError(RuntimeError):
    """The training cannot go on, for a reason that needs no traceback; exit code 1."""


class NotKeptError(TrainingError):
    """All updates were made, but the checkpoint of the last one, or the best one, could not be written."""


MAX_QUOTE_CHARS = 80
"""Maximum characters of a refused value in a message."""
MAX_WORD_CHARS = 300
"""Maximum characters of a word that a message gives whole: longer than most paths and host names."""


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that printing it cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\t" else _escaped(char) for char in text)


def printable_lines(text: str) -> str:
    """Return the text with all control characters escaped except line breaks and tabs."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures: ESC becomes ␛
    if code == 0x7F:
        return "\u2421"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def message_line(line: str, *, program: str) -> str:
    """Return a program's message as one printable line: control characters escaped, long words shortened."""
    return f"{program}: {printable(shorten_words(line))}"


def print_message(line: str, *, program: str) -> None:
    """Write one line to standard error, as ``message_line`` has it."""
    print(message_line(line, program=program), file=sys.stderr, flush=True)


def quoted(value: object) -> str:
    """Return the ``repr`` of a value, without its middle where it is long."""
    return _elide_middle(repr(value))


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first few names in words, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def ranks_text(ranks: Sequence[int], limit: int = 8) -> str:
    """Return ``rank 4``, ``ranks 4, 5``, ``ranks 4, 6 to 9`` or, beyond so many parts, ``ranks 1, 3, 5, … (12)``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [", ".join(map(str, range(low, high + 1))) if high - low < 2 else f"{low} to {high}" for low, high in parts]
    more = f", … ({len(ranks)})" if len(texts) > limit else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts[:limit])}{more}"


def require_utf8(argv: Iterable[str]) -> None:
    """Refuse words that are not UTF-8: neither the record nor another machine could hold them."""
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{quoted(word)} is not UTF-8 text; name it in UTF-8") from None


def shorten_words(line: str) -> str:
    """Return a message without the middle of words longer than ``MAX_WORD_CHARS``."""
    return re.sub(rf"\S{{{MAX_WORD_CHARS + 1},}}", lambda word: _elide_middle(word[0]), line)


def _elide_middle(text: str) -> str:
    if len(text) <= MAX_QUOTE_CHARS:
        return text
    end = MAX_QUOTE_CHARS // 3
    return f"{text[: MAX_QUOTE_CHARS - end - 1]}…{text[-end:]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or two that are as close; else an empty text."""
    words = list(dict.fromkeys(known))
    matches = [each for each in words if each.casefold() == word.casefold()][:1]
    matches = matches or difflib.get_close_matches(word, words, n=2, cutoff=0.6)
    ratios = [difflib.SequenceMatcher(None, match, word).ratio() for match in matches]
    names = [repr(match) for match, ratio in zip(matches, ratios, strict=True) if ratio > ratios[0] - 0.05]
    return f"; did you mean {' or '.join(names)}?" if names else ""
