"""Exact validation: every example of a split once, summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer import distributed
from trainer.data.loader import MicroBatch
from trainer.data.stream import StreamEvalBatches
from trainer.engine.model import to_device
from trainer.tasks.task import Task, summed_loss


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one pass over a split; equal on all ranks."""

    loss: float
    """Mean over the split, in nats."""
    metrics: dict[str, float]


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    device: torch.device,
    autocast: AbstractContextManager[Any],
    stop_requested: Callable[[], bool],
    waits: Callable[[], None],
) -> Evaluation | None:
    """Evaluate this rank's share of the split and sum with the others; None on all ranks once one was asked to stop.

    Args:
        task: gives the loss and the metrics.
        model: the unwrapped model; its mode is restored afterwards.
        batches: the split's batches of this rank; dummies do not count.
        device: where the batches go.
        autocast: the precision of the forward pass.
        stop_requested: whether this rank is to stop; asked after every batch.
        waits: told before this rank waits for the others.
    """
    training = model.training
    model.eval()
    totals: dict[str, float] = {"loss": 0.0, "count": 0.0, "stopped": 0.0}
    try:
        for micro in batches:
            weight = 1.0 if micro.samples else 0.0
            with autocast:
                loss, items, sums = summed_loss(task, model, to_device(micro.batch, device))
            totals["loss"] += float(loss) * weight
            totals["count"] += float(items) * weight
            for name, value in sums.items():
                totals[f"metric:{name}"] = totals.get(f"metric:{name}", 0.0) + float(value) * weight
            if stop_requested():  # not before the first batch, which tells what the metrics are called
                totals["stopped"] = 1.0
                break
    finally:
        model.train(training)
    waits()
    totals = {name: float(value) for name, value in distributed.all_reduce_dict(totals, device).items()}
    if totals["stopped"]:
        return None
    if isinstance(batches, StreamEvalBatches):
        batches.require_same()
    count = totals["count"]
    sums_all = {name.removeprefix("metric:"): value for name, value in totals.items() if name.startswith("metric:")}
    return Evaluation(loss=totals["loss"] / count, metrics=task.metrics(sums_all, count))
