"""Lists the recipes of a working folder and of the user's configuration folder."""

from __future__ import annotations

import os
import stat
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gputrain_tui.recipe.source import MAX_RECIPE_BYTES, TOP_LEVEL_KEYS
from trainer.contract.home_folder import expand_home


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """A recipe file in the list."""

    path: Path
    group: str
    """``recipes/``, ``this folder`` or ``yours``."""
    name: str
    """The recipe's ``name``; the file's name without suffix if it has none, or if another listed recipe has it too."""


def recipe_files(folder: Path, own: Path) -> list[RecipeFile]:
    """Return the recipes of a folder, of its ``recipes/`` and of the user's configuration folder ``own``."""
    folders = (("recipes/", folder / "recipes"), ("this folder", folder), ("yours", own / "recipes"))
    named = [
        (path, group, name)
        for group, parent in folders
        for path in _toml_files(parent)
        if (name := recipe_name(path)) is not None
    ]
    uses = Counter(name for _, _, name in named)
    return [
        RecipeFile(path=path, group=group, name=name if uses[name] == 1 else path.stem) for path, group, name in named
    ]


def matching_names(text: str, folder: Path) -> list[str]:
    """Return the names in the folder of a path that its last part begins, sorted; folders end with a slash."""
    head, slash, prefix = text.rpartition("/")
    try:
        with os.scandir(folder / expand_home(head + slash)) as entries:
            return sorted(
                entry.name + "/" * entry.is_dir()
                for entry in entries
                if entry.name.startswith(prefix) and (prefix or not entry.name.startswith("."))
            )
    except (OSError, ValueError):
        return []


def complete_path(text: str, folder: Path) -> tuple[str, list[str]]:
    """Return a path extended to the common beginning of all matching names, and these; folders end with a slash."""
    head, slash, prefix = text.rpartition("/")
    names = matching_names(text, folder)
    return head + slash + (os.path.commonprefix(names) or prefix), names  # noqa: RUF071 - by characters


def _toml_files(folder: Path) -> Iterable[Path]:
    max_files_per_folder = 200  # limit of files that are read: a folder may have thousands of TOML files
    try:
        return sorted(islice(folder.glob("*.toml"), max_files_per_folder))
    except OSError:
        return []


def recipe_name(path: Path) -> str | None:
    """Return a recipe's name; None for other TOML files, such as ``pyproject.toml``."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECIPE_BYTES:
            return None  # opening a pipe would block until a writer comes
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError):
        # A recipe with a syntax error is listed; opening it shows the error.
        return path.stem if "[train]" in text else None
    train = data.get("train")
    # One with a mistyped key is listed likewise.
    if not isinstance(train, dict) or not (train.keys() & {"task", "script"} or data.keys() <= set(TOP_LEVEL_KEYS)):
        return None
    name = data.get("name")
    return name if isinstance(name, str) else path.stem
