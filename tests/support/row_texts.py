"""Text of a drawn row."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import Row


def row_text(row: Row) -> str:
    """Return the text of a row."""
    return "".join(text for text, _ in row)
