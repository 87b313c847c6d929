"""Command palette that tolerates clicks outside the screen, sent before the terminal became smaller."""

from __future__ import annotations

from textual.command import CommandPalette
from textual.geometry import Region
from textual.widget import Widget


class Palette(CommandPalette):
    """Command palette."""

    def get_widget_at(self, x: int, y: int) -> tuple[Widget, Region]:
        """Return the widget at a point, which is moved into the screen if it lies outside."""
        return super().get_widget_at(min(x, self.size.width - 1), min(y, self.size.height - 1))
