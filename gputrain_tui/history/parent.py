"""Finds the runs that a run has resumed."""

from __future__ import annotations

import tomllib
from pathlib import Path

from gputrain_tui.history.run_folders import Run, open_run
from trainer.contract.record.regular_file import read_whole


def parent_of(run: Run) -> Run | None:
    """Return the run of the checkpoint that ``run`` resumed by its recipe; None if it resumed none, or that is gone."""
    try:
        recipe = tomllib.loads(read_whole(run.dir.recipe).decode())
        resumed = recipe.get("train", {}).get("resume")
        if not isinstance(resumed, str) or not resumed:
            return None
        checkpoint = Path(resumed)
        folder = checkpoint if checkpoint.name == "checkpoints" else checkpoint.parent
        if folder.name != "checkpoints" or folder.parent == run.dir.path:
            return None
        return open_run(folder.parent)
    except (OSError, ValueError, AttributeError):
        return None


def ancestors_of(run: Run) -> list[Run]:
    """Return the parent of ``run``, the parent's parent and so on, each once."""
    found: list[Run] = []
    while (parent := parent_of(found[-1] if found else run)) is not None:
        if parent.id == run.id or any(parent.id == known.id for known in found):
            break  # a copied folder
        found.append(parent)
    return found
