"""Which recipes there are: of the folder one is in, and of one's own."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gputrain_tui.recipe.model import TABLES
from gputrain_tui.recipe.source import MOST_BYTES

MOST_FILES = 200
"""Files that are looked into, per folder."""


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """A file that looks like a recipe."""

    path: Path
    group: str
    """``recipes/``, ``this folder`` or ``yours``."""
    name: str
    """As the recipe calls itself; the file's name when it does not."""


def recipe_files(folder: Path, own: Path) -> list[RecipeFile]:
    """Return the recipes of a folder, of its ``recipes/`` and of a person's configuration folder."""
    places = (("recipes/", folder / "recipes"), ("this folder", folder), ("yours", own / "recipes"))
    return [
        RecipeFile(path=path, group=group, name=name)
        for group, place in places
        for path in _tomls(place)
        if (name := recipe_name(path)) is not None
    ]


def _tomls(folder: Path) -> Iterable[Path]:
    try:
        return sorted(islice(folder.glob("*.toml"), MOST_FILES))
    except OSError:
        return []


def recipe_name(path: Path) -> str | None:
    """Return a recipe's name; None for a file that is none, such as ``pyproject.toml``."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            return None  # opening a pipe would wait for somebody who writes into it
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError):
        # A recipe with a slip is shown, and what is wrong with it when it is opened.
        return path.stem if "[train]" in text else None
    if not isinstance(data.get("train"), dict) or not set(data) <= set(TABLES):
        return None
    name = data.get("name")
    return name if isinstance(name, str) else path.stem
