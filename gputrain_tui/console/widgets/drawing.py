"""Rows of text with roles, and number formats, shared by the drawing functions.

A row is a list of ``(text, role)``; a widget turns roles into the theme's colours, a test joins the texts.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from math import floor, isfinite, log10

from rich.cells import cell_len, set_cell_size

from gputrain_tui.tables import GIB, printable

Row = list[tuple[str, str]]
"""Pieces of one line: text, and the role that gives its colour."""

EMPTY = "–"
RULE = "─"
EIGHTHS = " ▏▎▍▌▋▊▉█"
_NARROW = re.compile("[ -\u02ff\u2010-\u2027\u2190-\u2319\u2500-\u25fc\u2713-\u2717\u23ce\u2800-\u28ff]*").fullmatch
"""Matches texts of one cell per character without a lookup of every character's width, which is slower."""
LOWER = " ▁▂▃▄▅▆▇█"


def cell_count(text: str) -> int:
    """Return the number of cells of a text in any script."""
    return len(text) if _NARROW(text) else cell_len(text)


def crop(text: str, width: int) -> str:
    """Return a text cropped to ``width`` cells, with an ellipsis if it was longer."""
    if cell_count(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


def crop_start(text: str, width: int) -> str:
    """Return a text, such as a path, cropped to ``width`` cells, with an ellipsis before its end if it was longer."""
    return crop(text[::-1], width)[::-1]


def pad(text: str, width: int) -> str:
    """Return a text cropped or padded to ``width`` cells, left-aligned."""
    text = crop(text, width)
    return text + " " * (width - cell_count(text))


def row_cells(row: Row) -> int:
    """Return the number of cells of a row."""
    return sum(cell_count(text) for text, _ in row)


def fit_row(row: Row, width: int) -> Row:
    """Return a row of exactly ``width`` cells, without control characters."""
    out: Row = []
    free = width
    for text, role in row:
        if free <= 0:
            break
        if _NARROW(text):
            cells = len(text)
            if cells > free:
                text = text[:free]
        else:
            text = printable(text).replace("\t", " ")
            cells = cell_count(text)
            if cells > free:
                text = set_cell_size(text, free)
        out.append((text, role))
        free -= cells
    if free > 0:
        out.append((" " * free, "base"))
    return out


def fit_rows(rows: Sequence[Row], width: int, height: int) -> list[Row]:
    """Return exactly ``height`` rows of ``width`` cells: the first ones, then blank ones."""
    return [fit_row(row, width) for row in [*rows, *([[]] * height)][:height]]


def merge(pieces: Iterable[tuple[str, str]]) -> Row:
    """Return a row in which adjacent pieces of the same role are merged."""
    out: Row = []
    role_before: str | None = None
    texts: list[str] = []
    for text, role in pieces:  # half the time of groupby, for every line of a chart
        if role != role_before:
            if role_before is not None:
                out.append(("".join(texts), role_before))
            role_before, texts = role, []
        texts.append(text)
    if role_before is not None:
        out.append(("".join(texts), role_before))
    return out


def wrap_text(text: str, width: int) -> list[str]:
    """Return a text as lines of at most ``width`` characters, broken between words if possible."""
    return textwrap.wrap(text, max(width, 8), break_on_hyphens=False) or [""]


def title_row(width: int, left: Row, rights: Sequence[Row] = ()) -> Row:
    """Return a panel's title line: title, rule, and as many of ``rights`` as fit, the first one at the right end."""
    right: Row = []
    for piece in rights:
        more = [*piece, *([("  ", "rule"), *right] if right else [])]
        if row_cells(left) + row_cells(more) + 6 <= width:
            right = more
    rule = width - row_cells(left) - row_cells(right) - (2 if right else 1)
    if rule < 1:
        return fit_row(left, width)
    return [*left, (" " + RULE * rule, "rule"), *([(" ", "rule"), *right] if right else [])]


def centred_text(width: int, height: int, lines: Sequence[str]) -> list[Row]:
    """Return an empty panel with lines of text in the middle."""
    lines = [line for line in lines if cell_count(line) <= width][:height]
    rows: list[Row] = [[] for _ in range((height - len(lines)) // 2)]
    for line in lines:
        blank = width - cell_count(line)
        rows.append([(" " * (blank // 2 + (blank & width & 1)) + line, "dim")])
    return fit_rows(rows, width, height)


def format_number(value: float | None, digits: int, width: int) -> str:
    """Return a number with ``digits`` decimals, or as many as fit, right-aligned in ``width`` cells."""
    if value is None or not isfinite(value):
        return EMPTY.rjust(width)
    text = f"{value:.{digits}f}"
    while len(text) > width and digits:
        digits -= 1
        text = f"{value:.{digits}f}"
    return text.rjust(width) if len(text) <= width else format_short(value, width)


def format_short(value: float, width: int = 6) -> str:
    """Return a number of any size in at most ``width`` cells, right-aligned."""
    for form in ("g", ".4g", ".3g", ".2g", ".0e"):
        text = f"{value:{form}}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        if len(text) <= width:
            return text.rjust(width)
    return "…".rjust(width)


def format_value(value: float | None) -> str:
    """Return a value with four significant digits; three if it is below 1."""
    if value is None or not isfinite(value):
        return EMPTY
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        digits = 3 if value == 0 else max(0, (3 if abs(value) >= 1 else 2) - floor(log10(abs(value))))
        return f"{value:,.{digits}f}"
    return format_short(value, 8).strip()


def nice_step(span: float, most: int) -> float:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten, of which at most ``most`` fit into a span."""
    rough = span / max(most, 1)
    power = 10.0 ** floor(log10(rough))
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)), 10 * power)


def scroll_thumb(top: int, visible: int, total: int) -> range:
    """Return the lines of a scroll bar's thumb."""
    size = max(round(visible * visible / max(total, 1)), 1)
    begin = round((visible - size) * top / max(total - visible, 1))
    return range(begin, begin + size)


def group_size(ranks: int, most: int) -> int:
    """Return the ranks per group, so that there are at most ``most`` groups; above eight a multiple of eight."""
    size = max(-(-ranks // max(most, 1)), 1)
    return size if size <= 8 else -(-size // 8) * 8


def bar(share: float | None, width: int) -> Row:
    """Return a horizontal bar of ``width`` cells, filled by a share of 0 to 1 in steps of half a cell."""
    if share is None:
        return [(EMPTY.center(width), "dim")]
    full, half = divmod(round(min(max(share, 0.0), 1.0) * width * 2), 2)
    text = "━" * full + "╸" * half
    nearly_full = 0.9  # share from which the bar is shown as a warning
    return [(text, "warning" if share >= nearly_full else "bar"), (RULE * (width - len(text)), "rule")]


def format_gib(value: int | None, digits: int = 1) -> str:
    """Return a number of bytes in GiB, without the unit."""
    return EMPTY if value is None else f"{value / GIB:.{digits}f}"


def bar_below(value: float, top: float) -> str:
    """Return a cell filled from below by the share of ``value`` in ``top``, at least an eighth; blank for NaN."""
    if not isfinite(value):
        return " "
    return LOWER[min(max(round(8 * value / top), 1), 8)] if top > 0 else LOWER[1]
