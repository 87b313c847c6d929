"""Styled text for a terminal: pieces of text with a style each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gputrain_tui.tables import printable

Piece = tuple[str, str]
"""Text and its style: ``""``, ``dim``, ``bold``, ``accent`` or ``alarm``."""
STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "accent": "\x1b[36m", "alarm": "\x1b[31m"}


def paint(pieces: Iterable[Piece], *, colour: bool) -> str:
    """Return the text of pieces with control characters made visible, and with escape sequences for ``colour``."""
    shown = ((printable(text), style) for text, style in pieces)
    return "".join(f"{STYLES[style]}{text}\x1b[0m" if colour and style and text else text for text, style in shown)


def length(pieces: Iterable[Piece]) -> int:
    """Return the number of characters of pieces."""
    return sum(len(text) for text, _ in pieces)


def clip(pieces: Sequence[Piece], width: int) -> list[Piece]:
    """Return the pieces cut to a number of characters, with an ellipsis if anything was cut."""
    if length(pieces) <= width:
        return list(pieces)
    cut: list[Piece] = []
    room = width - 1
    for text, style in pieces:
        if room <= 0:
            break
        cut.append((text[:room], style))
        room -= len(text)
    return [*cut, ("…", "dim")]
