"""Columns of the tables: their values, titles, widths and texts, and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gputrain_tui.console.widgets.drawing import EMPTY, format_number, pad
from gputrain_tui.row_filter import FilterColumn, Row as Item, Value
from gputrain_tui.tables import printable


@dataclass(frozen=True, kw_only=True)
class Column(FilterColumn[Item]):
    """One column; its value sorts and filters, a number is right-aligned."""

    title: str
    width: int
    """Cells, or the fewest ones of a column that grows with its values."""
    order: int
    """Order of importance: narrow tables drop the columns with the greatest numbers."""
    form: Callable[[Any, int], str]
    """Returns a value as text; the width is that of the cell."""
    role: str | Callable[[Item], str] = "bright"

    @property
    def aligned_title(self) -> str:
        return self.title.rjust(self.width) if self.is_number else self.title.ljust(self.width)

    def text(self, item: Item, width: int = 0) -> str:
        """Return the text of a cell, exactly ``width`` cells long; 0: the column's width."""
        width = width or self.width
        value = self.value(item)
        text = EMPTY if value is None else self.form(value, width)
        return text.rjust(width) if self.is_number and len(text) <= width else pad(text, width)

    def role_of(self, item: Item) -> str:
        return self.role if isinstance(self.role, str) else self.role(item)


def text_column(
    key: str,
    width: int,
    order: int,
    value: Callable[[Item], Value],
    *,
    form: Callable[[Any, int], str] = lambda value, width: printable(value).replace("\t", " ") or EMPTY,
    role: str = "bright",
    allowed: Sequence[str] = (),
) -> Column[Item]:
    """Return a left-aligned column, whose title is its key."""
    return Column(
        key=key, title=key, width=width, order=order, is_number=False, value=value, form=form, role=role,
        allowed=allowed,
    )  # fmt: skip


def number_column(
    key: str,
    width: int,
    order: int,
    value: Callable[[Item], Value],
    *,
    title: str = "",
    digits: int = 0,
    form: Callable[[Any, int], str] | None = None,
    role: str | Callable[[Item], str] = "bright",
) -> Column[Item]:
    """Return a right-aligned column, of numbers with ``digits`` decimals, or as many as fit, unless it has a form."""

    def decimals(value: float, width: int) -> str:
        if value != value:
            return "nan"
        text = f"{value:.0f}" if digits == 0 else ""
        return text if 0 < len(text) <= width else format_number(value, digits, width)

    return Column(
        key=key, title=title or key, width=width, order=order, is_number=True, value=value, form=form or decimals,
        role=role,
    )  # fmt: skip


def fitting(
    columns: Sequence[Column[Item]],
    free: int,
    *,
    gap: int = 2,
    cells: Mapping[str, int] | None = None,
    order: Callable[[Column[Item]], int] = lambda column: column.order,
) -> list[Column[Item]]:
    """Return the most important columns, as many as fit into ``free`` cells with a gap beside each.

    ``cells``: widths by key, of columns that grow with their values.
    """
    kept = []
    for column in sorted(columns, key=order):
        free -= (column.width if cells is None else cells[column.key]) + gap
        if free < 0:
            break
        kept.append(column.key)
    return [column for column in columns if column.key in kept]
