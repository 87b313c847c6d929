"""List of recipes, grouped by folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from gputrain_tui.console.widgets.canvas import Heading, Listing
from gputrain_tui.console.widgets.drawing import Row, title_row
from gputrain_tui.recipe.files import RecipeFile
from gputrain_tui.tables import printable


class RecipeList(Listing[RecipeFile]):
    """List of the recipes of the working folder and of the user's configuration folder."""

    opened: Path | None = None
    edited: Collection[Path] = ()

    def show(self, files: Sequence[RecipeFile]) -> None:
        """List recipe files, which come in order of their groups."""
        lines: list[RecipeFile | Heading] = []
        for group, members in groupby(files, key=lambda file: file.group):
            lines += [Heading(group), *members]
        self.show_lines(lines)

    def key(self, line: RecipeFile) -> Path:
        return line.path

    def head(self, width: int) -> list[Row]:
        return [title_row(width, [("recipes", "title")])]

    def row(self, line: RecipeFile, width: int) -> Row:
        is_open = line.path == self.opened
        sign = "•" if line.path in self.edited else "▸" if is_open else " "
        return [(f"{sign} ", "accent"), (printable(line.name), "bright" if is_open else "dim")]

    def empty(self, width: int, height: int) -> list[Row]:
        searched = ("No recipe here.", "", "Looked in", "./*.toml and", "./recipes/*.toml")
        return [[(text, "dim")] for text in (*searched, "", "n  a new one", "d  run the demo")][:height]
