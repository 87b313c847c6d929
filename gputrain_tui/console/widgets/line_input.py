"""Input of one line that takes pasted text whole, or not at all."""

from __future__ import annotations

import re

from textual.events import Paste
from textual.widgets import Input


class LineInput(Input):
    """Input line; Textual's own keeps the first line of a pasted block and drops the rest without a word."""

    def on_paste(self, event: Paste) -> None:
        """Insert a pasted line in place of the selection; refuse several."""
        event.prevent_default()
        event.stop()
        # A shell continues a line that ends in a backslash; terminals send a carriage return for a line's end.
        lines = re.sub(r"\\(\r\n|\r|\n)", " ", event.text).strip("\r\n").splitlines()
        if len(lines) > 1:
            self.app.bell()
            text = f"not pasted: it has {len(lines):,} lines, and this line takes one"
            self.notify(text, severity="error", markup=False)
        elif lines:
            self.replace(lines[0], *self.selection)
