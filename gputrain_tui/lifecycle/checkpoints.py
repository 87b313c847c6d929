"""Finds the checkpoint that continues a run: in its run directory, or in the folder that ``train.save_dir`` names."""

from __future__ import annotations

from pathlib import Path

from gputrain_tui.lifecycle.remote_nodes import remote_node
from trainer.contract.record import RunDir, recorded_checkpoints

NAMES = ("step_*.pt", "best.pt")
"""Names of checkpoints; the folder holds other files as well, such as its lock."""


def checkpoint_to_resume(run_dir: RunDir) -> Path | None:
    """Return what continues the run: a folder, whose newest good checkpoint is taken, or a file; None without any.

    A folder outside of the run directory, ``train.save_dir``, may hold checkpoints of other trainings. Those of this
    run are the ones that its record names; beside others the last of them is meant and not the folder. Where rank 0
    was on a host with a run directory of its own, the path is one of that host, and its record alone is known here.
    """
    remote = remote_node(run_dir, 0)
    if remote is not None:
        recorded = recorded_checkpoints(run_dir)[-1:]
        folder = RunDir(remote.run_dir).checkpoints
        return next((folder if path.parent == folder else path for path in recorded), None)
    if _checkpoints_in(run_dir.checkpoints):
        return run_dir.checkpoints
    named = [path for path in recorded_checkpoints(run_dir) if path.is_file()]
    if not named:
        return None
    last = named[-1]
    own = {path.name for path in named if path.parent == last.parent}
    return last.parent if _checkpoints_in(last.parent) <= {*own, "best.pt"} else last


def _checkpoints_in(folder: Path) -> set[str]:
    return {path.name for name in NAMES for path in folder.glob(name)}
