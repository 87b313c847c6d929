"""List the checkpoints that a run has written, also outside of its run directory."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.contract.record.events import Checkpoint, decode_events
from trainer.contract.record.regular_file import open_regular
from trainer.contract.record.run_dir import RunDir


def recorded_checkpoints(run_dir: RunDir, *, only_best: bool = False) -> list[Path]:
    """Return the recorded checkpoints, or those that were the best so far, oldest first; some may be deleted since."""
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
