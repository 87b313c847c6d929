"""Writes a run to TensorBoard or Weights & Biases while it goes on; each value once, also after a writer was killed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gputrain_tui.history.export.steps import SingleStep
from gputrain_tui.history.export.tensorboard_folder import (
    PREFIX,
    EventFile,
    hyper_parameters,
    over_ranks,
    rank_scalars,
    validation_scalars,
)
from trainer.contract.record import RunDir, Validation


class TensorBoardSink:
    """Appends to event files in the layout of ``gputrain export --to tensorboard``."""

    def __init__(self, run_dir: RunDir, world_size: int, folder: Path, *, began: float, sizes: dict[str, int]) -> None:
        """Continue the files of a folder.

        Args:
            run_dir: the run's directory.
            world_size: its number of ranks.
            folder: folder of the event files.
            began: start of the run, Unix seconds; part of the files' names.
            sizes: committed bytes of each file, by its folder; later bytes are written again.
        """
        self._folder = folder
        self._began = began
        self._several = world_size > 1
        self.sizes = sizes
        """Committed bytes of each file, by its folder within the folder."""
        self._pending: dict[str, tuple[io.BytesIO, EventFile]] = {}
        if "." not in sizes:
            self._file(".").hyper_parameters(hyper_parameters(run_dir, world_size), began=began, ended=None)

    def rank(self, rank: int, single: SingleStep, *, restarted: bool) -> None:
        """Write a step of one rank."""
        self._write(f"rank_{rank}", rank_scalars(single), single, restarted)

    def over_ranks(self, row: list[SingleStep], *, restarted: bool) -> None:
        """Write mean, minimum and maximum of a step over the ranks."""
        for part, values in zip((".", "lowest", "highest"), over_ranks(row), strict=True):
            if part == "." or self._several:
                self._write(part, values, row[-1], restarted)

    def validation(self, event: Validation) -> None:
        """Write an evaluation."""
        self._file(".").scalars(validation_scalars(event), step=event.step, time=event.time)

    def commit(self, save: Callable[[], None]) -> None:
        """Append the pending values to the files, then save the files' sizes.

        Raises:
            OSError: they cannot be written.
        """
        for part, (data, _) in self._pending.items():
            folder = self._folder / part
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{PREFIX}{int(self._began):010d}.gputrain"
            size = self.sizes.get(part, 0)
            with path.open("r+b" if path.exists() else "wb") as file:
                # Values that a killed writer wrote after its last commit are written again, byte for byte.
                file.seek(min(size, file.seek(0, os.SEEK_END)))
                file.truncate()
                file.write(data.getbuffer())
                self.sizes[part] = file.tell()
        self._pending.clear()
        save()

    def finish(self) -> None:
        """Leave the files as they are: they need no end."""

    def _write(self, part: str, values: dict[str, float], single: SingleStep, restarted: bool) -> None:
        file, step = self._file(part), single.step
        if restarted:
            file.restarted(step=step.step, time=step.time)
        file.scalars(values, step=step.step, time=step.time)

    def _file(self, part: str) -> EventFile:
        if part not in self._pending:
            data = io.BytesIO()
            self._pending[part] = data, EventFile(data, time=None if part in self.sizes else self._began)
        return self._pending[part][1]


class WandbSink:
    """Logs mean, minimum and maximum over the ranks to Weights & Biases, with the user's ``wandb`` and its settings."""

    def __init__(self, run_dir: RunDir, world_size: int, project: str, *, logged: int) -> None:
        """Begin or continue the run of the same id there; ``logged``: number of calls of ``log`` before."""
        import wandb

        self._pending: list[dict[str, float]] = []
        self._several = world_size > 1
        name = run_dir.path.name
        self._run: Any = wandb.init(
            project=project,
            id=name,
            name=name,
            dir=str(run_dir.path),
            config=hyper_parameters(run_dir, world_size),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # After a restart the step goes back. wandb's own step cannot, so that it counts the calls of log.
        self._run.define_metric("*", step_metric="step")
        self._logged = logged

    def rank(self, rank: int, single: SingleStep, *, restarted: bool) -> None:
        """Skip single ranks: thousands of charts would hide the others."""

    def over_ranks(self, row: list[SingleStep], *, restarted: bool) -> None:
        """Log mean, minimum and maximum of a step over the ranks."""
        means, lows, highs = over_ranks(row)
        values = {"step": float(row[0].step.step), **means}
        if self._several:
            values |= {f"lowest/{tag}": value for tag, value in lows.items()}
            values |= {f"highest/{tag}": value for tag, value in highs.items()}
        self._pending.append(values)

    def validation(self, event: Validation) -> None:
        """Log an evaluation."""
        self._pending.append({"step": float(event.step), **validation_scalars(event)})

    def commit(self, save: Callable[[], None]) -> None:
        """Save the progress, then log: a logged value cannot be taken back, and must not be logged twice."""
        save()
        for values in self._pending:
            self._run.log(values, step=self._logged)
            self._logged += 1
        self._pending.clear()

    def finish(self) -> None:
        """Finish the run there: wandb uploads the rest unless it is offline."""
        self._run.finish()
