"""Writes text to standard output and error with control characters made visible.

Host names, recipes, paths and messages are untrusted: they must not send escape sequences to a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from trainer.contract import errors
from trainer.contract.errors import printable_lines


class PrintableStream:
    """Text stream that makes control characters visible, except line breaks and tabs."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream
        """Underlying stream, for coloured text whose parts are already printable."""

    def write(self, text: str) -> int:
        return self.unfiltered.write(printable_lines(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Replace standard output and error by ``PrintableStream`` within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def discard(stream: TextIO) -> None:
    """Redirect a stream's descriptor to ``/dev/null``: its buffer and later writes neither fail nor block."""
    with suppress(OSError):  # a stream without a descriptor cannot block
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, stream.fileno())
        os.close(null)


def print_message(line: str) -> None:
    """Write one line for people to standard error, with control characters made visible."""
    errors.print_message(line, program="gputrain")


def log_line(text: str) -> None:
    """Print a line to standard error, unbuffered; one that cannot be written, as on a full disk, is lost."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def print_styled(text: str) -> None:
    """Print coloured text whose quoted parts are already printable."""
    print(text, file=getattr(sys.stdout, "unfiltered", sys.stdout))


def print_json(text: str, *, before: str = "", end: str = "\n") -> None:
    """Print JSON, between other texts, with control characters as escapes, which decode to the same text."""
    print(before + (text if text.isprintable() else re.sub(r"[^ -~]", _json_escape, text)), end=end)


def without_nan(value: Any) -> Any:
    """Return lists and dicts with None in place of NaN, for which JSON has no number."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if value != value else value


def json_line(line: bytes) -> bytes:
    """Return a line of JSON with DEL and U+0080 to U+009F escaped, control characters that JSON allows unescaped."""
    return re.sub(rb"\x7f|\xc2[\x80-\x9f]", lambda match: b"\\u00%02x" % match[0][-1], line)


def _json_escape(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
