"""Checkpoints that a run has written, also outside of its run directory, and the one to resume from."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.contract.record.events import Checkpoint
from trainer.contract.record.json_lines import decode_events
from trainer.contract.record.regular_file import open_regular
from trainer.contract.record.run_dir import RunDir

BEST = "best.pt"
NAMES = ("step_*.pt", "epoch_*.pt", BEST)
"""Names of checkpoints; the folder holds other files as well, such as its lock."""


def recorded_checkpoints(run_dir: RunDir, *, only_best: bool = False) -> list[Path]:
    """Return the checkpoints in the record, oldest first; some may have been deleted.

    Args:
        run_dir: the run.
        only_best: only those that were the best when they were written.
    """
    found: list[Path] = []
    try:
        with os.fdopen(open_regular(run_dir.rank_events(0)), "rb") as file:
            for line in file:
                if b'"checkpoint"' in line:
                    events = [event for event in decode_events(line) if type(event) is Checkpoint]
                    found += [Path(event.path).absolute() for event in events if event.best or not only_best]
    except OSError:
        return found
    return found


def checkpoint_to_resume(run_dir: RunDir) -> Path | None:
    """Return the value of ``--resume`` that continues the run: a folder, a file, or None without a checkpoint.

    A folder outside of the run directory, ``train.save_dir``, may also hold checkpoints of other trainings. In that
    case return the last checkpoint of this run's record instead of the folder.
    """
    if checkpoints_in(run_dir.checkpoints):
        return run_dir.checkpoints
    named = [path for path in recorded_checkpoints(run_dir) if path.is_file()]
    if not named:
        return None
    last = named[-1]
    own = {path.name for path in named if path.parent == last.parent}
    return last.parent if checkpoints_in(last.parent) <= {*own, BEST} else last


def checkpoints_in(folder: Path) -> set[str]:
    """Return the names of the checkpoints in a folder."""
    return {path.name for name in NAMES for path in folder.glob(name)}
