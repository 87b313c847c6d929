"""Formats plain tables, aligned by display width, and numbers, sizes and durations in them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.contract.errors import (  # for the users of this module, too
    printable as printable,
    ranks_text as ranks_text,
)


@dataclass(frozen=True)
class TableColumn:
    """Column of a table."""

    title: str
    """Title with the unit of numbers."""
    right: bool = False
    """Whether cells are right-aligned, for numbers."""


def table(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with columns two spaces apart, cells made printable, without a final newline."""
    lines = [[column.title for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(width(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            _pad(cell, wide, column.right) for cell, wide, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def width(text: str) -> int:
    """Return the width of a text in terminal cells: two for wide characters, none for combining marks."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, cells: int) -> str:
    """Return a text cut to a width in terminal cells, with an ellipsis if anything is cut."""
    if width(text) <= cells:
        return text
    kept = ""
    for char in text:
        if width(kept) + width(char) >= cells:
            break
        kept += char
    return kept.rstrip() + "…"[:cells]


def cut_apart(texts: Sequence[str], cells: int) -> list[str]:
    """Return texts cut to a width, such as paths: at their beginnings where cutting the ends would make them alike."""
    shown = [cut(text, cells) for text in texts]
    return shown if len({*shown}) == len({*texts}) else [cut(text[::-1], cells)[::-1] for text in texts]


def _pad(text: str, wide: int, right: bool) -> str:
    space = " " * (wide - width(text))
    return space + text if right else text + space


GIB = 1 << 30
"""Bytes of a GiB, in which memory is shown."""


def size(count: int | None) -> str:
    """Return bytes in binary units with two or three digits: ``80 GiB``, ``1.5 MiB``; empty for None."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.1f} {unit}"


def duration(seconds: float | None) -> str:
    """Return a duration as ``42 s``, ``3:07``, ``1:02:03`` or ``2 d 03:04``; empty for None."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minutes}:{second:02}" if minutes else f"{second} s"


def on_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return ``on rank 3``, ``on ranks 1 to 3, 6`` or ``on all ranks``."""
    return "on all ranks" if 1 < len(ranks) == world_size else f"on {ranks_text(ranks)}"


def number(value: float | None, digits: int = 0) -> str:
    """Return a number as ``1,234`` or, below 1000, with ``digits`` decimals; ``1.00e+20`` if huge; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def counted(count: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def evaluation(where: str, loss: float, metrics: Mapping[str, float]) -> str:
    """Return the result of an evaluation: ``(weights of step 340)  loss 0.0613  accuracy 0.9800``."""
    return f"{where}  loss {loss:.4f}" + "".join(f"  {name} {value:.4f}" for name, value in metrics.items())


def of_weights(step: int) -> str:
    """Return the step of the tested weights: ``(weights of step 340)``."""
    return f"(weights of step {step})"


ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
