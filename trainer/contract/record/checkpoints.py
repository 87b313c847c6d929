"""Checkpoints of a run, also in a folder that it shares with other runs, and the one to resume from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.checkpoint_trailer import trailer_of
from trainer.contract.record.events import Checkpoint
from trainer.contract.record.json_lines import decode_events
from trainer.contract.record.regular_file import open_regular
from trainer.contract.record.run_dir import RunDir

DCP_METADATA = ".metadata"
"""File in a folder of ``torch.distributed.checkpoint`` that describes the others, written last."""
BEST = "best.pt"
"""Name of the best checkpoint so far: a second name of its step's file."""
LOCK = ".lock"
"""Name of the file that a training locks. It is never deleted: two processes could then lock two inodes of one name."""
NAMES = ("step_*.pt", "epoch_*.pt", BEST, "best.of-*.pt")
"""Names of checkpoints; the folder holds other files as well, such as its lock.

A name with ``.of-``: another run has used the name for a file of its own."""


def recorded_checkpoints(run_dir: RunDir) -> list[Path]:
    """Return the checkpoints in the record, oldest first; some may have been deleted."""
    paths: list[Path] = []
    with contextlib.suppress(OSError), os.fdopen(open_regular(run_dir.rank_events(0)), "rb") as file:
        for line in file:
            if b'"checkpoint"' in line:
                events = [event for event in decode_events(line) if type(event) is Checkpoint]
                paths += [Path(event.path).absolute() for event in events]
    return paths


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A folder with checkpoints of a run, and perhaps of others, which wrote into the same ``train.save_dir``."""

    path: Path
    own: tuple[Path, ...]
    """Those of the run, newest first."""
    foreign: tuple[Path, ...]

    @property
    def best(self) -> Path | None:
        """The best checkpoint of the run; None if it has none here."""
        return next((path for path in self.own if path.match("best*")), None)

    @property
    def to_resume(self) -> Path:
        """The value of ``--resume``: the folder, for its newest intact checkpoint, or the run's newest file."""
        return self.own[0] if self.foreign else self.path


def run_folders(run_dir: RunDir, run_ids: Collection[str]) -> list[RunFolder]:
    """Return the folders with checkpoints of a run: its own one, else the last one in its record first.

    A damaged file, which names no run, counts as the run's in its own folder, and elsewhere if the record lists it.
    """
    recorded = {path: index for index, path in enumerate(recorded_checkpoints(run_dir))}
    folders: list[RunFolder] = []
    for folder in dict.fromkeys([run_dir.checkpoints, *(path.parent for path in reversed(recorded))]):
        newness: dict[Path, tuple[int, int, str]] = {}
        foreign: list[Path] = []
        for path in (folder / name for name in checkpoints_in(folder)):
            trailer = trailer_of(path)
            run, sequence = (trailer.run, trailer.sequence) if trailer is not None else ("", 0)
            key = (sequence, recorded.get(path.absolute(), -1), path.name)
            if (run in run_ids) if run else (folder == run_dir.checkpoints or path.absolute() in recorded):
                newness[path] = key
            else:
                foreign.append(path)
        if newness:
            own = sorted(newness, key=newness.__getitem__, reverse=True)
            folders.append(RunFolder(path=folder, own=tuple(own), foreign=tuple(foreign)))
    return folders


def checkpoint_to_resume(run_dir: RunDir, run_ids: Collection[str]) -> Path | None:
    """Return the value of ``--resume`` that continues the run: a folder, a file, or None without a checkpoint."""
    return next((folder.to_resume for folder in run_folders(run_dir, run_ids)), None)


def checkpoints_in(folder: Path) -> set[str]:
    """Return the names of the checkpoints in a folder."""
    return {path.name for name in NAMES for path in folder.glob(name)}


def is_dcp_folder(path: Path) -> bool:
    """Return whether a path is a folder that ``torch.distributed.checkpoint`` has written, or has begun to write."""
    return path.is_dir() and ((path / DCP_METADATA).is_file() or any(path.glob("*.distcp")))


def foreign_run(folder: Path, run: str) -> tuple[str, list[str]]:
    """Return the run of the newest checkpoint in a folder that is not of this run, and the names of all such files.

    Returns:
        The other run, empty if the file names none, and the names, newest first; no names without such a file.
    """
    others = [
        (trailer.sequence, name, trailer.run)
        for name in checkpoints_in(folder)
        if (trailer := trailer_of(folder / name)) is not None and (trailer.run != run or not run)
    ]
    others.sort(reverse=True)
    return (others[0][2] if others else ""), [name for _, name, _ in others]
