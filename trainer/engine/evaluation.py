"""Exact evaluation: every example of a split once, summed over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer import distributed
from trainer.contract.errors import RequestError, TrainingError
from trainer.data.loader import MicroBatch
from trainer.data.stream_batches import StreamEvalBatches
from trainer.engine.ddp_model import to_device
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task, summed_loss


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of one pass over a split; equal on all ranks."""

    loss: float
    metrics: dict[str, float]

    @property
    def non_finite(self) -> str:
        results = {"loss": self.loss, **self.metrics}
        return ", ".join(f"{name} {value}" for name, value in results.items() if not math.isfinite(value))


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[MicroBatch],
    ctx: WorkerContext,
    autocast: AbstractContextManager[Any],
    *,
    sharded: bool = False,
) -> Evaluation | None:
    """Evaluate this rank's share of a split and sum over all ranks; None on all ranks if one was asked to stop.

    The batches are the same on any number of ranks and their sums are added exactly, so that the result does not depend
    on the world size. The ranks of a ``sharded`` model compute each batch together, so that they stop together.
    """
    training = model.training
    model.eval()
    each: dict[str, list[float]] = {"loss": [], "count": []}
    stopped = False
    try:
        for micro in batches:
            with autocast, refuse_gradients(task):
                loss, items, metrics = summed_loss(task, model, to_device(micro.batch, ctx.device))
            sums = {"loss": loss, "count": items, **{f"metric:{name}": value for name, value in metrics.items()}}
            for name, value in sums.items():
                each.setdefault(name, []).append(float(value) if micro.samples else 0.0)
            stop = ctx.stop_requested()
            if sharded:
                stop = any(distributed.max_async([stop])())
            if stop:  # after at least one batch, which gives the names of the metrics
                stopped = True
                break
    finally:
        model.train(training)
    ctx.before_wait()
    own = {name: torch.tensor(values, dtype=torch.float64) for name, values in each.items()}
    ranks = distributed.all_gather_list((stopped, own))
    if any(rank_stopped for rank_stopped, _ in ranks):
        return None
    named = [", ".join(values) for _, values in ranks]
    if len(set(named)) > 1:
        raise TrainingError(
            f"ranks sum different values: {'; '.join(f'rank {n} has {text}' for n, text in enumerate(named))}"
        )
    totals = {name: _exact_sum([value for _, values in ranks for value in values[name].tolist()]) for name in own}
    if isinstance(batches, StreamEvalBatches):
        batches.require_same()
    count = totals["count"]
    if not count:
        raise TrainingError("loss() returned a count of 0 for every batch of the split")
    summed = {name.removeprefix("metric:"): value for name, value in totals.items() if name.startswith("metric:")}
    given = task.metrics(summed, count)
    try:
        # Floats: a task may compute with tensors, which the record does not hold.
        numbers = {name: float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise TrainingError(
            f"{type(task).__name__}.metrics() returned {given!r:.100}, but must return a dict of numbers"
        ) from None
    return Evaluation(loss=totals["loss"] / count, metrics=numbers)


@contextmanager
def refuse_gradients(task: Task) -> Iterator[None]:
    """Explain torch's error about a gradient that the task's loss computes, where no graph is recorded."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad and does not have a grad_fn" not in str(error):
            raise
        raise RequestError(
            f"{type(task).__name__}.loss() computes a gradient in a validation, which records none: put what it is "
            "computed from into `with torch.enable_grad():`"
        ) from error


def _exact_sum(values: Sequence[float]) -> float:
    """Return the sum, rounded once, so that it does not depend on the order."""
    # fsum raises on infinities of both signs, whose sum is not a number.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
