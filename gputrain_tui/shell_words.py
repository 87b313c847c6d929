"""Quotes words for a shell, on one line and without control characters."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from itertools import groupby


def shell_quoted(word: str) -> str:
    r"""Return a word quoted for bash; unprintable characters become ``$'\x1b'``."""
    if word.isprintable():
        return shlex.quote(word)
    parts = ((printable, "".join(chars)) for printable, chars in groupby(word, str.isprintable))
    return "".join(shlex.quote(part) if printable else f"$'{_escaped(part)}'" for printable, part in parts)


def shell_joined(argv: Iterable[str]) -> str:
    """Return the quoted words joined by spaces."""
    return " ".join(map(shell_quoted, argv))


def _escaped(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode("utf-8", "surrogateescape"))
