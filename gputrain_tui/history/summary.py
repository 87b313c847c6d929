"""One run as a row of a list: its state, progress and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gputrain_tui.history.runs import ENDED, Run, UnreadableRun, last_step

LONGEST_NAME = 60
"""Characters that a recipe's name takes in the list."""
KEYS = (
    "id", "state", "recipe", "world_size", "step", "loss", "started", "ended", "duration_s", "exit_code", "message",
    "run_dir",
)  # fmt: skip
"""What ``describe`` gives."""
UNREADABLE = "unreadable"
"""State of a run of which nothing can be told."""


def describe_all(runs: Sequence[Run], unreadable: Sequence[UnreadableRun], *, now: float) -> list[dict[str, Any]]:
    """What is listed of all runs, those last that cannot be read."""
    return [*(describe(run, now=now) for run in runs), *map(describe_unreadable, unreadable)]


def describe_unreadable(run: UnreadableRun) -> dict[str, Any]:
    """What is listed of a run that cannot be read: its name, its folder and why."""
    told = dict.fromkeys(KEYS)
    return told | {"id": run.id, "state": UNREADABLE, "message": run.problem, "run_dir": str(run.dir.path)}


def describe(run: Run, *, now: float) -> dict[str, Any]:
    """What is listed of a run; a value that is not known is None."""
    status = run.status
    step, loss = status.step, status.loss
    if status.status not in ENDED:  # nobody has summed it up yet: rank 0 stands for all
        newest = last_step(run.dir)
        step, loss = (step, loss) if newest is None else (newest.step, newest.loss)
    over = run.state != status.status or status.status in ENDED
    until = status.ended if over else now
    return {
        "id": run.id,
        "state": run.state,
        "recipe": status.recipe,
        "world_size": status.world_size,
        "step": step,
        "loss": loss,
        "started": status.started,
        "ended": status.ended,
        "duration_s": None if until is None else until - status.started,
        "exit_code": status.exit_code,
        "message": status.message,
        "run_dir": str(run.dir.path),
    }
