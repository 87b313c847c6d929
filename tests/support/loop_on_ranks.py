"""Train on the ranks of a ``Gang``, in processes that have torch loaded: ``python -m trainer`` without the start-up."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_log import newest
from worker_contexts import worker_context

from trainer.checkpoint import load
from trainer.contract.errors import RequestError, TrainingError
from trainer.contract.options import Training
from trainer.engine.loop import Loop


def train_on(rank: int, world_size: int, task: str, folder: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train and return the results as plain values.

    Args:
        rank: rank in the gang.
        world_size: number of ranks of the gang.
        task: ``module:Class`` in this folder.
        folder: folder of the checkpoints.
        options: options of ``Training``; ``task_options`` are those of the task, ``again`` marks a run that continues
            itself, ``trace`` records the weights before each micro-step.
    """
    torch.set_num_threads(1)
    module, name = task.split(":")
    kind = getattr(importlib.import_module(module), name)
    given = dict(options)
    again, trace = given.pop("again", False), given.pop("trace", False)
    own = kind.Options(**given.pop("task_options", {}))
    training = Training(**{"task": task, "max_epochs": 2, **given})  # type: ignore[arg-type]
    narration: list[str] = []
    context = worker_context(
        rank,
        world_size,
        print_line=narration.append,
        checkpoints=None if folder is None else Path(folder),
        resumed_from=_file(training.resume) if training.resume else None,
    )
    seen: list[Any] = []
    weights: list[dict[str, torch.Tensor]] = []

    class RecordingTask(kind):  # type: ignore[misc, valid-type]
        def loss(self, model: torch.nn.Module, batch: Any) -> Any:
            if model.training and trace:
                state = model.state_dict()
                weights.append({name.removeprefix("module."): value.clone() for name, value in state.items()})
            if model.training:
                seen.append(len(batch[0]) if isinstance(batch, list | tuple) else len(batch))
            return super().loss(model, batch)

    try:
        loop = Loop(RecordingTask(own), training, context)
        if training.finetune_from:
            fitting, other = loop.state.fitting_weights(training.finetune_from, partial=training.finetune_partial)
            loop.state.begin_with(loop.strategy.spread(lambda: {"model": fitting})["model"])
            narration.append(other)
        if training.resume:
            state = loop.strategy.spread(partial(state_of, training.resume))
            loop.state.load_state_dict(state, source=training.resume, own_checkpoint=again)
        loop.run()
    except (RequestError, TrainingError) as error:
        return {"error": str(error), "narration": narration}
    return {
        "error": "",
        "narration": narration,
        "updates": loop.updates,
        "model": {name: whole(value) for name, value in loop.raw_model.state_dict().items()},
        "batches": seen,
        "weights": weights,
        "best": [loop.best.value, loop.best.step],
        "lr": loop.schedule.lr,
    }


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, whole if it is divided among the ranks."""
    gathered: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered.detach().clone()


def _file(resume: str) -> Path | None:
    """Return the checkpoint that a training resumes: the named one, or the newest of the named folder."""
    if not Path(resume).is_dir():
        return Path(resume)
    found = newest(Path(resume))
    return None if found is None else found[0]


def state_of(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint's state, or that of the newest one of a folder."""
    if not Path(path).is_dir():
        return load(path)
    found = newest(path)
    assert found is not None
    return found[1]
