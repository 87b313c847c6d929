"""How long a run takes to save, from the checkpoints in the records of it and of earlier runs."""

from __future__ import annotations

from pathlib import Path

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.recipe.model import Recipe
from trainer.contract.record import Checkpoint, RunDir, Step, decode_events
from trainer.contract.record.regular_file import read_tail


def saving_time_s(run_dir: RunDir) -> float | None:
    """Return how long a run takes to save, seconds: its longest step, which must end first, and its longest write.

    Both are of the end of its record; None if there is no checkpoint.
    """
    try:
        events = decode_events(read_tail(run_dir.rank_events(0)).partition(b"\n")[2])
    except OSError:
        return None
    writes_ms = [event.write_ms for event in events if isinstance(event, Checkpoint)]
    steps_ms = [event.step_ms for event in events if isinstance(event, Step) and event.step_ms is not None]
    return (max(writes_ms) + max(steps_ms, default=0.0)) / 1e3 if writes_ms else None


def saving_time_before(recipe: Recipe) -> float | None:
    """Return how long saving took in the run that a recipe resumes, else in the newest of its name; None if unknown."""
    resumed = Path(recipe.train.resume) if recipe.train.resume else None
    if resumed is not None:
        for folder in (resumed.parent, resumed.parent.parent):
            if (found := saving_time_s(RunDir(folder))) is not None:
                return found
    same = (run for run in list_runs() if run.status.recipe == recipe.name)
    return next((found for run in same if (found := saving_time_s(run.dir)) is not None), None)
