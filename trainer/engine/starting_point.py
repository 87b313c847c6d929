"""Checkpoint or weights from which a run starts, opened before its task reads any data.

A task numbers words and labels by its data, so the numbering that the weights were trained with has to be there first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import distributed
from trainer.checkpoint import exported_task_state, has_trailer, open_checkpoint, peek
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import CheckpointError, RequestError
from trainer.contract.options import Training
from trainer.contract.record.checkpoints import checkpoints_in
from trainer.engine import task_state
from trainer.engine.task_state import TASK_STATE
from trainer.tasks.registry import is_same_task
from trainer.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint that rank 0 has read."""

    path: Path
    state: dict[str, Any]
    passed_over: list[str]
    """A line for each newer checkpoint that cannot be used, and about the run if it may be another one."""


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """What a run starts from; on every rank, except for the checkpoint itself."""

    source: str = ""
    """The file; empty for a run that starts afresh."""
    task: str = ""
    task_state: dict[str, Any] | None = None
    opened: OpenCheckpoint | None = None
    """The checkpoint of ``--resume`` or ``--eval-only``; only on rank 0."""
    refused: RequestError | None = None
    """Why it could not be opened; only on rank 0, which raises it once it can offer another one."""

    def checkpoint(self) -> OpenCheckpoint:
        """Return the opened checkpoint, on rank 0."""
        if self.refused is not None:
            raise self.refused
        assert self.opened is not None
        return self.opened

    def restore_into(self, task: Task, *, name: str) -> None:
        """Restore the state into a task, if it is of a task of this name; call it before ``datasets``."""
        if self.task_state is not None and is_same_task(self.task, name):
            task_state.restore(task, self.task_state, source=self.source)


def open_start(options: Training) -> StartingPoint:
    """Open what the options name: ``resume``, ``eval_only`` or ``finetune_from``; every rank calls this.

    Rank 0 reads and sends: the others need no file, and cannot choose a different one.
    """
    if not (options.resume or options.eval_only or options.finetune_from):
        return StartingPoint()
    mine = _read(options) if distributed.is_master() else StartingPoint()
    sent = distributed.from_master(lambda: (mine.source, mine.task, mine.task_state))
    if distributed.is_master():
        return mine
    source, task, state = sent
    return StartingPoint(source=source, task=task, task_state=state)


def _read(options: Training) -> StartingPoint:
    if options.resume or options.eval_only:
        flag, named = ("--resume", options.resume) if options.resume else ("--eval-only", options.eval_only)
        try:
            mapped = options.strategy == "fsdp"  # not even rank 0 may have memory for all of it
            path, state, passed_over = open_checkpoint(
                Path(str(named)),
                flag=flag,
                run=options.checkpoint_run,
                mapped=mapped,
                names_whole=not options.resume,  # it is checked there what fits
            )
        except RequestError as error:
            return StartingPoint(source=str(named), refused=error)
        notes = [*passed_over, _whose(Path(str(named)), path, options.checkpoint_run)]
        opened = OpenCheckpoint(path=path, state=state, passed_over=[note for note in notes if note])
        return StartingPoint(source=str(path), opened=opened, **_known(state))
    file = Path(str(options.finetune_from))
    return StartingPoint(source=str(file), **_known(_entries_of(file)))


def _whose(named: Path, path: Path, run: str) -> str:
    """Return a line about the run of a checkpoint, if that was not asked for or is not known; else an empty text."""
    own = owner_of(path)
    if run:
        return "" if own else f"{path} does not say whose it is; taken as one of {run}"
    others = {owner_of(named / name) for name in checkpoints_in(named)} - {own, ""}
    if not others:
        return ""
    return (
        f"{named} holds checkpoints of several runs: {path.name}, the newest, is of {own or 'one that is not known'}; "
        f"--checkpoint-run takes those of {', '.join(sorted(others))}"
    )


def _entries_of(file: Path) -> dict[str, Any]:
    """Return the plain entries of a file of weights; none if it has none or cannot be read, which is refused later."""
    try:
        if file.suffix == ".safetensors":
            return exported_task_state(file)
        return peek(file) if has_trailer(file) else {}
    except CheckpointError:
        return {}


def _known(entries: dict[str, Any]) -> dict[str, Any]:
    task, state = entries.get("task"), entries.get(TASK_STATE)
    return {"task": task if isinstance(task, str) else "", "task_state": state if isinstance(state, dict) else None}
