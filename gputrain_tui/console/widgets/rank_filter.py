"""The filter of the rank grid, by the columns of its table."""

from __future__ import annotations

from gputrain_tui.console.widgets.rank_columns import COLUMNS, Lateness, RankColumn
from gputrain_tui.row_filter import FilterColumn, RowFilter, Value
from gputrain_tui.state import RankView

_Row = tuple[RankView, Lateness]


class RankFilter:
    """Filter of ranks; without words all match."""

    def __init__(self, text: str = "") -> None:
        """Read a filter line.

        Raises:
            RequestError: a word is not understood; the message says what is allowed.
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
    """Return whether rank, host, device or state match."""
    view, _ = row
    if word.isdecimal():
        return view.rank == int(word)
    part = word.casefold()
    return any(part in text.casefold() for text in (view.host, view.device, view.display_state) if text is not None)
