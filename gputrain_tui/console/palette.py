"""The palette, which outlives what Textual's own does not: a click from before the terminal became smaller."""

from __future__ import annotations

from textual.command import CommandPalette
from textual.geometry import Region
from textual.widget import Widget


class Palette(CommandPalette):
    """Finds any action by its name."""

    def get_widget_at(self, x: int, y: int) -> tuple[Widget, Region]:
        """Return what is under a point, or under the nearest one that there still is."""
        return super().get_widget_at(min(x, self.size.width - 1), min(y, self.size.height - 1))
