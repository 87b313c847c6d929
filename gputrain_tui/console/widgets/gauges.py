"""Small pieces that the panels of machines share: a bar, sizes, whole numbers, words on lines."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import EMPTY, Row

FULL = 0.9
"""From this share on a bar is drawn as nearly full."""
GIB = 1 << 30


def bar(share: float | None, wide: int) -> Row:
    """Return a bar with half a cell's precision on a faint line."""
    if share is None:
        return [(EMPTY.center(wide), "dim")]
    full, half = divmod(round(min(max(share, 0.0), 1.0) * wide * 2), 2)
    text = "━" * full + "╸" * half
    return [(text, "warning" if share >= FULL else "bar"), ("─" * (wide - len(text)), "rule")]


def gib(value: int | None, digits: int = 1) -> str:
    """Return bytes in GiB."""
    return EMPTY if value is None else f"{value / GIB:.{digits}f}"


def whole(value: float | None) -> str:
    """Return a number without decimals."""
    return EMPTY if value is None else f"{value:.0f}"


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of whole words."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]
