"""Saving of a training's checkpoints, and their events in the record.

``trainer.checkpoint`` writes the files atomically.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import distributed
from trainer.checkpoint import ENTRIES, CheckpointWriter, GatheredTensors, HostTensors, Saved, capture_rng, kinds
from trainer.contract import record
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import RequestError
from trainer.contract.record.checkpoints import foreign_run
from trainer.engine import reports
from trainer.engine.ddp_model import Strategy
from trainer.engine.worker_context import WorkerContext

State = dict[str, Any]


class Saving:
    """Saving of one training's checkpoints; every rank has an instance, rank 0 writes."""

    def __init__(self, ctx: WorkerContext, strategy: Strategy, *, keep_last: int, keep_last_epochs: int = 0) -> None:
        """Open the folder for checkpoints; every rank calls this."""
        has_folder = distributed.all_gather_list(ctx.checkpoints is not None)
        self.enabled = has_folder[0]
        """Whether rank 0 has a folder for checkpoints; the others need none."""
        if any(has_folder) and not self.enabled:
            rank = has_folder.index(True)
            raise RequestError(f"--save-dir is given to rank {rank} and not to rank 0, which writes the checkpoints")
        self._strategy = strategy
        self.keeps_epochs = keep_last_epochs != 0
        self.last_update = -1
        """Steps done when the last checkpoint was begun, or when training was resumed."""
        self.last_epoch: int | None = None
        """The epoch that ended there, if the checkpoint is kept as that of an epoch's end."""
        self.last_time = time.monotonic()
        self._ctx = ctx
        self._begun = -1
        """Steps done at the last save of this training; -1 before the first."""
        self._not_gathered = ""
        """Why the tensors of the last checkpoint could not be gathered; empty if they were."""
        self._on_disk: Saved | None = None
        """Newest checkpoint that was written; its file may have been deleted since."""
        self.run = ctx.run_id
        self._writer: CheckpointWriter | None = None
        if ctx.checkpoints is not None and ctx.rank == 0:
            # A restart of a command without an id: its first start has refused a folder of another run.
            continues = (ctx.is_restart and not ctx.run_id) or (
                ctx.resumed_from is not None and ctx.resumed_from.parent.resolve() == ctx.checkpoints.resolve()
            )
            self.run = ctx.run_id or (_run_to_continue(ctx) if continues else "") or _new_run_id()
            self._writer = CheckpointWriter(
                ctx.checkpoints,
                keep_last=keep_last,
                keep_last_epochs=keep_last_epochs,
                run_id=self.run,
                continues=continues,
                on_saved=self._saved,
                on_failed=self._failed,
                host_tensors=GatheredTensors if strategy.sharded else HostTensors,
            )

    def inherit_best(self, path: Path, *, step: int) -> None:
        if self._writer is not None:
            self._writer.inherit_best(path, step=step)

    def save(self, state: Callable[[], State], *, step: int, best: bool = False, epoch: int | None = None) -> None:
        """Start to write a checkpoint; every rank calls this, because each gives its random state."""
        self.last_update, self.last_epoch, self.last_time = step, epoch, time.monotonic()
        self._ctx.before_wait()
        rng = distributed.all_gather_list(capture_rng())
        if self._writer is None and not self._strategy.sharded:
            return
        self._ctx.set_state("saving")
        self._begun, self._not_gathered = step, ""
        try:
            whole = self._strategy.whole(state)
        except OSError as error:
            self._not_gathered = error.strerror or str(error)
            self._failed(step, f"checkpoint of step {step} was not written: {self._not_gathered}")
        else:
            if self._writer is not None:
                entries = {**whole, "rng": rng, "recipe": self._ctx.recipe, "run": self.run}
                self._writer.save({**entries, ENTRIES: kinds(entries)}, step=step, best=best, epoch=epoch)
        self._ctx.set_state("training")

    def wait(self, timeout_s: float) -> None:
        """Wait until the checkpoints that were begun are on disk, but no longer than ``timeout_s``."""
        if self._writer is not None:
            self._writer.wait(timeout_s)

    def close(self) -> str:
        """Wait for pending checkpoints; return one line about one that was not written, else an empty string."""
        if self._writer is None:
            return ""
        self._ctx.set_state("saving")
        not_saved = self._writer.close()
        last = self._kept()
        if self._begun >= 0 and (last is None or last.step != self._begun):
            why = next((one.why for one in not_saved if one.step == self._begun), self._not_gathered)
            why = why or "its file has been deleted"
            known = f"the last checkpoint is step {last.step}" if last is not None else "there is no checkpoint"
            return f"{known}; that of step {self._begun} was not kept: {why}"
        # The last checkpoint is there, but the best one may not be.
        lost = next((one for one in not_saved if one.best), None)
        return f"the best checkpoint, of step {lost.step}, was not written: {lost.why}" if lost is not None else ""

    def path_of(self, step: int) -> Path | None:
        """Return the path of the newest checkpoint if it is of this step, else None; rank 0 only."""
        last = self._kept()
        return last.path if last is not None and last.step == step else None

    def _kept(self) -> Saved | None:
        """Return the newest checkpoint of this training that is still there."""
        return self._on_disk if self._on_disk is not None and self._on_disk.path.is_file() else None

    def _saved(self, saved: Saved) -> None:
        if self._on_disk is None or saved.step >= self._on_disk.step:  # the best one may be written last
            self._on_disk = saved
        path = os.fsencode(saved.path).decode(errors="backslashreplace")  # a path need not be UTF-8, the record must be
        self._ctx.writer.write(
            record.Checkpoint(
                time=time.time(),
                step=saved.step,
                path=path,
                bytes=saved.bytes,
                write_ms=saved.write_ms,
                best=saved.best,
                run=self.run,
            )
        )

    def _failed(self, step: int, why: str) -> None:
        text = (
            "the checkpoint folder must be there, be writable and have free space; the training goes on and "
            "tries the next checkpoint"
        )
        reports.finding(self._ctx, "checkpoint_lost", why, severity="critical", step=step, advice=text)


def _run_to_continue(ctx: WorkerContext) -> str:
    """Return the run whose checkpoints a training without an id of its own continues: it is that run, going on."""
    if ctx.resumed_from is not None:
        return owner_of(ctx.resumed_from)
    assert ctx.checkpoints is not None
    return foreign_run(ctx.checkpoints, "")[0]


def _new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-by-hand-{secrets.token_hex(4)}"
