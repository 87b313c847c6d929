"""Path of the demo's recipe: the copy in an installed package, or the file of the repository."""

from __future__ import annotations

from pathlib import Path

CANDIDATES = (
    Path(__file__).with_name("demo.toml"),
    Path(__file__).parents[2] / "recipes" / "demo.toml",
)
"""The copy in an installed package, and the file of the repository."""


def recipe_path() -> Path:
    """Return the recipe that the console offers on its first start."""
    return next((place for place in CANDIDATES if place.is_file()), CANDIDATES[0])
