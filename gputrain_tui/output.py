"""Where text leaves for a terminal, a file or a pipe: the one place that keeps what it quotes from commanding anything.

Host names, recipes, paths and messages come from others, and whoever prints them need not remember it.
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
    """A text stream that takes line breaks and tabs and makes every other control character visible."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream
        """For text whose parts were made printable before it got colours."""

    def write(self, text: str) -> int:
        """Write the text, printable."""
        return self.unfiltered.write(printable_lines(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Have everything that is printed made printable."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def discard(stream: TextIO) -> None:
    """Send what a stream still holds, and all that will be written to it, nowhere: it must neither fail nor wait."""
    with suppress(OSError):  # a stream without a descriptor holds nothing up
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def narrate(line: str) -> None:
    """Write one line for people to standard error, whatever it quotes."""
    errors.narrate(line, program="gputrain")


def print_styled(text: str) -> None:
    """Print text with colours; each part that is quoted in it was made printable before."""
    print(text, file=getattr(sys.stdout, "unfiltered", sys.stdout))


def print_json(text: str) -> None:
    """Print JSON with what a terminal might obey written as escapes, which mean the same to whoever decodes it."""
    print(text if text.isprintable() else re.sub(r"[^ -~]", _json_escape, text))


def json_line(line: bytes) -> bytes:
    """Return a line of JSON with the controls escaped that JSON itself lets pass: DEL and U+0080 to U+009F."""
    return re.sub(rb"\x7f|\xc2[\x80-\x9f]", lambda match: b"\\u00%02x" % match[0][-1], line)


def _json_escape(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
