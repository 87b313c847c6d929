"""How long a run takes to save, from the checkpoints in the records of it and of earlier runs."""

from __future__ import annotations

from pathlib import Path

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.recipe.model import Recipe
from trainer.contract.record import Checkpoint, RunDir, decode_events
from trainer.contract.record.regular_file import read_tail

TAIL_BYTES = 1 << 20
"""Bytes at the end of rank 0's events in which its last checkpoints are searched."""


def longest_save_s(run_dir: RunDir) -> float | None:
    """Return the longest write of the last checkpoints of a run, seconds; None if it has recorded none there."""
    try:
        tail = read_tail(run_dir.rank_events(0), TAIL_BYTES)
    except OSError:
        return None
    lines = b"".join(line for line in tail.splitlines(keepends=True) if b'"checkpoint"' in line)
    writes_ms = [event.write_ms for event in decode_events(lines) if isinstance(event, Checkpoint)]
    return max(writes_ms) / 1e3 if writes_ms else None


def saving_time_before(recipe: Recipe) -> float | None:
    """Return how long saving took in the run that a recipe resumes, else in the newest of its name; None if unknown."""
    resumed = Path(recipe.train.resume) if recipe.train.resume else None
    if resumed is not None:
        for folder in (resumed.parent, resumed.parent.parent):
            if (found := longest_save_s(RunDir(folder))) is not None:
                return found
    same = (run for run in list_runs() if run.status.recipe == recipe.name)
    return next((found for run in same if (found := longest_save_s(run.dir)) is not None), None)
