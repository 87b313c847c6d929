"""Reads ``recipe.toml`` of a run directory as it stands, without validation: a recipe may be of another machine."""

from __future__ import annotations

import tomllib
from typing import Any

from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_whole


def recorded_recipe(run: RunDir) -> dict[str, Any] | None:
    """Return the values of a run's recipe; None if there is none, or it cannot be read."""
    try:
        return tomllib.loads(read_whole(run.recipe, MAX_RECIPE_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def recorded_table(run: RunDir, name: str) -> dict[str, Any]:
    """Return a table of a run's recipe; an empty one if there is none."""
    table = (recorded_recipe(run) or {}).get(name)
    return table if isinstance(table, dict) else {}
