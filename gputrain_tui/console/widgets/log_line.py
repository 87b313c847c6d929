"""Log lines as cells: SGR colours decoded, other control sequences removed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rich.ansi import SGR_STYLE_MAP
from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from gputrain_tui.history.log_buffer import Level, LogLine, level_of
from gputrain_tui.tables import ESCAPES, printable

NO_STYLE = Style.null()
LEVEL_SIGNS = {Level.WARNING: ("▲", "warning"), Level.ERROR: ("✗", "error")}

Pieces = list[tuple[str, Style]]
"""Pieces of a line: text, and the style that its SGR sequences set."""


def decoded(raw: bytes) -> Pieces:
    """Return a line's text with its colours; control characters and bytes that are not UTF-8 become visible."""
    text = raw.decode("utf-8", "backslashreplace")
    if text.isascii() and text.isprintable():
        return [(text, NO_STYLE)]
    pieces: Pieces = []
    style, start = NO_STYLE, 0
    for escape in ESCAPES.finditer(text):
        pieces.append((text[start : escape.start()], style))
        start = escape.end()
        if escape[0].startswith("\x1b[") and escape[0].endswith("m"):
            style = _apply_sgr(style, escape[0][2:-1])
    pieces.append((text[start:], style))
    column = 0
    out: Pieces = []
    for part, style in pieces:
        part = printable((" " * column + part).expandtabs()[column:])
        if part:
            column += len(part)
            out.append((part, style))
    return out


def _apply_sgr(style: Style, codes: str) -> Style:
    """Return a style changed by the codes of an SGR sequence."""
    numbers = iter([int(code) if code.isdigit() else 0 for code in codes.replace(":", ";").split(";")])
    for number in numbers:
        if number == 0:
            style = NO_STYLE
        elif number in (38, 48):
            colour = _colour(numbers)
            if colour is not None:
                style += Style(color=colour) if number == 38 else Style(bgcolor=colour)
        elif number in SGR_STYLE_MAP and number not in (5, 6, 8):  # except blinking and hidden text
            style += Style.parse(SGR_STYLE_MAP[number])
    return style


def _colour(numbers: Iterator[int]) -> Color | None:
    """Return the colour after code 38 or 48: ``5;n`` of the palette, or ``2;r;g;b``; None for other codes."""
    kind = next(numbers, 0)
    if kind == 5:
        return Color.from_ansi(min(next(numbers, 0), 255))
    if kind == 2:
        red, green, blue = (min(next(numbers, 0), 255) for _ in range(3))
        return Color.from_rgb(red, green, blue)
    return None


def prefix(name: str, width: int) -> str:
    """Return a line's source, right-aligned: ``r3`` a rank, ``n0`` a node agent, ``sup`` the supervisor."""
    short = f"r{name}" if name.isdecimal() else name.replace("node-", "n") if name.startswith("node-") else name[:3]
    return printable(short).rjust(width) + " "


def line_strip(
    line: LogLine,
    styles: Mapping[str, Style],
    *,
    width: int,
    shift: int = 0,
    prefix_cells: int = 0,
    clock: str = "",
    flagged: bool = False,
    needle: str = "",
    at_match: bool = False,
) -> Strip:
    """Return a line of the log as exactly ``width`` cells.

    The text is scrolled sideways by ``shift`` cells, but not what precedes it: the time ``clock``, the source in
    ``prefix_cells`` cells (0: none), in the colour of a warning if ``flagged``, and the sign of the level. The search
    text ``needle`` is highlighted, more strongly if the search has stopped ``at_match``.
    """
    level = level_of(line.raw)
    ground = styles["base"]
    if level is not Level.ALL:
        ground += styles["error" if level is Level.ERROR else "warning"]
    pieces = decoded(line.raw)
    if needle:
        pieces = _highlighted(pieces, needle, styles["current" if at_match else "match"])
    segments = [Segment(text, ground + style) for text, style in pieces]
    if line.cut_bytes:
        segments.append(Segment(f" … {line.cut_bytes:,} bytes more", styles["base"] + styles["dim"]))
    free = width
    head: list[Segment] = []
    source = prefix(line.name, prefix_cells - 1) if prefix_cells else ""
    sign = ("", "prefix")
    if (clock or source) and level is not Level.ALL:  # the sign takes the last cell of the prefix
        clock, source = (clock, source[:-1]) if source else (clock[:-1], "")
        sign = LEVEL_SIGNS[level]
    for text, role in ((clock, "prefix"), (source, "warning" if flagged else "prefix"), sign):
        text = text[: max(free, 0)]
        head.append(Segment(text, styles["base"] + styles[role]))
        free -= cell_len(text)
    body = Strip(segments).crop(shift, shift + free) if shift else Strip(segments)
    return Strip([*head, *body.adjust_cell_length(max(free, 0), styles["base"])], width)


def _highlighted(pieces: Pieces, needle: str, highlight: Style) -> Pieces:
    """Return the pieces with every occurrence of a text highlighted, also across pieces."""
    whole = "".join(text for text, _ in pieces).lower()
    if len(whole) != sum(len(text) for text, _ in pieces):  # a few letters change their length with their case
        return pieces
    spans = [match.span() for match in re.finditer(re.escape(needle.lower()), whole)]
    out: Pieces = []
    start = 0
    for text, style in pieces:
        at = 0
        for begin, end in spans:
            low, high = max(begin - start, at), min(end - start, len(text))
            if low < high:
                out += [(text[at:low], style), (text[low:high], style + highlight)]
                at = high
        out.append((text[at:], style))
        start += len(text)
    return [(text, style) for text, style in out if text]
