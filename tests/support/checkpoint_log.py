"""Reports of a checkpoint writer, and contents of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint import CheckpointWriter, Saved, good_ones
from trainer.checkpoint.folder_lock import LOCK


class CheckpointLog:
    """Reports of a writer."""

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


def newest(folder: Path, *, on_skipped: Callable[[str], None] = print) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest intact checkpoint of a folder with its state; None without any."""
    return next(good_ones(folder, on_skipped=on_skipped), None)


def step_of(found: tuple[Path, dict[str, Any]] | None) -> int:
    assert found is not None
    return int(found[1]["step"])
