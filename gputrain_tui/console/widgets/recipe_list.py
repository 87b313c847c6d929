"""List of recipes, grouped by folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gputrain_tui.console.widgets.canvas import Listing
from gputrain_tui.console.widgets.drawing import Row, fit_row, title_row
from gputrain_tui.recipe.files import RecipeFile
from gputrain_tui.tables import printable


@dataclass(frozen=True)
class FolderHeading:
    """Heading over the recipes of one folder."""

    text: str


class RecipeList(Listing):
    """List of the recipes of the working folder and of the user's configuration folder."""

    opened: Path | None = None
    """File of the recipe in the form."""
    edited: Collection[Path] = ()
    """Files of the recipes with unsaved changes."""
    _lines: Sequence[FolderHeading | RecipeFile] = ()

    def show(self, files: Sequence[RecipeFile]) -> None:
        """List recipe files, which come in order of their groups."""
        lines: list[FolderHeading | RecipeFile] = []
        for file in files:
            if not lines or getattr(lines[-1], "group", None) != file.group:
                lines.append(FolderHeading(file.group))
            lines.append(file)
        self._lines = lines
        if self._lines and not self.selectable(min(self.cursor, len(self._lines) - 1)):
            self.cursor = 1
        self.redraw()

    def point_at(self, path: Path) -> None:
        """Put the cursor on a recipe."""
        for index, line in enumerate(self._lines):
            if isinstance(line, RecipeFile) and line.path == path:
                self.go(index)

    @property
    def file(self) -> RecipeFile | None:
        """The recipe under the cursor."""
        line = self._lines[self.cursor] if self.cursor < len(self._lines) else None
        return line if isinstance(line, RecipeFile) else None

    def count(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def selectable(self, index: int) -> bool:
        """Return whether a line is a recipe."""
        return isinstance(self._lines[index], RecipeFile)

    def head(self, width: int) -> list[Row]:
        """Return the title line."""
        return [title_row(width, [("recipes", "title")])]

    def row(self, index: int, width: int) -> Row:
        """Return the line of a recipe or of a folder."""
        line = self._lines[index]
        if isinstance(line, FolderHeading):
            return fit_row([("  ", "base"), (line.text, "accent")], width)
        is_open = line.path == self.opened
        mark = "•" if line.path in self.edited else "▸" if is_open else " "
        return fit_row([(f"{mark} ", "accent"), (printable(line.name), "bright" if is_open else "dim")], width)

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the text of an empty list: the searched folders."""
        searched = ("No recipe here.", "", "Looked in", "./*.toml and", "./recipes/*.toml")
        texts = (*searched, "", "n  a new one", "d  run the demo")
        return [fit_row([(text, "dim")], width) for text in texts][:height]
