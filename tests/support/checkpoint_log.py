"""What a writer of checkpoints reports, and what a folder of checkpoints holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.checkpoint import CheckpointWriter, Saved
from trainer.checkpoint.folder_lock import LOCK


class CheckpointLog:
    """What a writer has reported."""

    def __init__(self) -> None:
        self.saved: list[Saved] = []
        self.failed: list[tuple[int, str]] = []

    def writer(self, folder: Path, *, keep_last: int = 2) -> CheckpointWriter:
        return CheckpointWriter(
            folder,
            keep_last=keep_last,
            on_saved=self.saved.append,
            on_failed=lambda step, line: self.failed.append((step, line)),
        )


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def step_of(found: tuple[Path, dict[str, Any]] | None) -> int:
    assert found is not None
    return int(found[1]["step"])
