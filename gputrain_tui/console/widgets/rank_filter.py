"""Filter of the rank table by its columns."""

from __future__ import annotations

from gputrain_tui.console.widgets.rank_columns import COLUMNS, Lateness, RankColumn
from gputrain_tui.row_filter import FilterColumn, RowFilter, Value
from gputrain_tui.state import RankView

_Row = tuple[RankView, Lateness]


class RankFilter:
    """Filter of ranks; an empty one keeps all."""

    def __init__(self, text: str = "") -> None:
        """Parse a filter line.

        Raises:
            RequestError: a word cannot be parsed; the message names the allowed forms.
        """
        self._filter = RowFilter(text, _COLUMNS, _anywhere)
        self.text = self._filter.text

    def keeps(self, view: RankView, late: Lateness) -> bool:
        """Return whether a rank is shown."""
        return self._filter.keeps((view, late))


def _filter_column(column: RankColumn) -> FilterColumn[_Row]:
    def value(row: _Row) -> Value:
        return column.value(*row)

    return FilterColumn(key=column.key, is_number=column.digits is not None, value=value)


_COLUMNS = {column.key: _filter_column(column) for column in COLUMNS}


def _anywhere(word: str, row: _Row) -> bool:
    """Return whether a word without a column matches: a number the rank, else part of host, device or state."""
    view, _ = row
    if word.isdecimal():
        return view.rank == int(word)
    part = word.casefold()
    return any(part in text.casefold() for text in (view.host, view.device, view.display_state) if text is not None)
