"""Metrics that a task's ``loss`` returns in training steps: their means since they were recorded last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.distributed.host_copies import begin_copy, host_copies
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task
from trainer.telemetry.own_metrics import OWN


class StepMetrics:
    """Sums of this rank's metrics and of its items, which stay on the device until the writer's thread wants them."""

    def __init__(self, task: Task, ctx: WorkerContext) -> None:
        self._task = task
        self._copies = ctx.copies or host_copies(ctx.device)
        self._is_on = ctx.writer.enabled
        self._step = 0
        self._sums: dict[str, Tensor | float] = {}
        self._count: Tensor | float = 0.0
        OWN.record_to(ctx.writer, ctx.rank, lambda: self._step, lambda value: begin_copy(value, self._copies))

    def add(self, sums: Mapping[str, Tensor | float], count: Tensor | float) -> None:
        """Add the sums of a micro-batch over ``count`` items."""
        if not sums or not self._is_on:
            return
        for name, value in sums.items():
            number = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums[name] + number if name in self._sums else number
        self._count = self._count + (count.detach() if isinstance(count, Tensor) else count)

    def after_step(self, step: int, *, last: bool = False) -> None:
        """Begin to copy the sums to the host if they are wanted, or if this is the ``last`` step."""
        self._step = step
        if not self._sums or not (OWN.wanted or last):
            return
        numbers = [*self._sums.values(), self._count]
        tensors = [number.reshape(()).to(torch.float64) for number in numbers if isinstance(number, Tensor)]
        if tensors:
            copy = begin_copy(torch.stack(tensors), self._copies)
            OWN.add_sums(copy, partial(self._means, tuple(self._sums), numbers), step=step)
        else:
            OWN.add(self._means(tuple(self._sums), numbers, ()), step=step)
        self._sums, self._count = {}, 0.0

    def _means(
        self, names: Sequence[str], numbers: Sequence[Tensor | float], of_tensors: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the metrics from sums and count, of which the tensors are on the host as numbers."""
        copied = iter(of_tensors)
        *sums, count = [next(copied) if isinstance(number, Tensor) else float(number) for number in numbers]
        if not count:
            return {}
        metrics = self._task.metrics(dict(zip(names, sums, strict=True)), count)
        return {name: float(value) for name, value in metrics.items()}
