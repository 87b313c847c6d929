"""Bars, sizes and integers for the panels of hosts."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import EMPTY, Row

NEARLY_FULL_SHARE = 0.9
"""Share from which a bar is shown as a warning."""
GIB = 1 << 30
"""Bytes of a GiB."""


def bar(share: float | None, width: int) -> Row:
    """Return a horizontal bar of ``width`` cells, filled by a share of 0 to 1 in steps of half a cell."""
    if share is None:
        return [(EMPTY.center(width), "dim")]
    full, half = divmod(round(min(max(share, 0.0), 1.0) * width * 2), 2)
    text = "━" * full + "╸" * half
    return [(text, "warning" if share >= NEARLY_FULL_SHARE else "bar"), ("─" * (width - len(text)), "rule")]


def format_gib(value: int | None, digits: int = 1) -> str:
    """Return a number of bytes in GiB, without the unit."""
    return EMPTY if value is None else f"{value / GIB:.{digits}f}"


def format_integer(value: float | None) -> str:
    """Return a number without decimals."""
    return EMPTY if value is None else f"{value:.0f}"
