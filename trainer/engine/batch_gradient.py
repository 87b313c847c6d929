"""The gradient of a micro-batch: its forward and backward pass, and a second way where memory has run out."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.contract.options import Training
from trainer.data.loader import MicroBatch
from trainer.engine.accelerator import batch_copy
from trainer.engine.compilation import Compilation
from trainer.engine.ddp_model import Strategy, compression, keep_buffers, with_sparse_gradient
from trainer.engine.item_count import ItemCount
from trainer.engine.model_flops import FlopCount
from trainer.engine.non_finite import FiniteCheck
from trainer.engine.optimizers import LossScaler
from trainer.engine.out_of_memory import OutOfMemoryError, divides, is_out_of_memory, part_of, raise_out_of_memory
from trainer.engine.parameter_use import ParameterUse
from trainer.engine.share_balance import ShareBalance
from trainer.engine.step_metrics import StepMetrics
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task, summed_loss
from trainer.telemetry.step_meter import StepMeter


@dataclass(kw_only=True)
class BatchGradient:
    """Adds the gradients of one rank's micro-batches to its parameters."""

    task: Task
    options: Training
    ctx: WorkerContext
    strategy: Strategy
    parameters: Sequence[nn.Parameter]
    autocast: AbstractContextManager[Any]
    meter: StepMeter
    items: ItemCount
    finite: FiniteCheck
    scaler: LossScaler
    metrics: StepMetrics
    use: ParameterUse
    flops: FlopCount
    compilation: Compilation
    balance: ShareBalance
    _before: Sequence[int] = field(default=(), init=False)
    """Versions of the gradients before the micro-batch in progress, -1 without one; none before a step's first one."""

    def __post_init__(self) -> None:
        self._to_device = batch_copy(self.ctx.device)
        # DDP accepts no other way to a gradient with these options, and a sparse one has no versions.
        self._may_divide = self.balance.enabled and not (
            self.options.static_graph
            or self.options.find_unused_parameters
            or compression(self.options)[0]
            or with_sparse_gradient(self.strategy.module)
        )

    def add(self, micro: MicroBatch, *, step: int, last: bool) -> Tensor | float:
        """Add the gradient of a micro-batch, with balanced shares also if memory runs out; return its summed loss."""
        counted = self.items.samples
        if self._may_divide:
            self._before = [_version(each) for each in self.parameters] if counted else ()
        try:
            return self._pass(micro, step=step, last=last)
        except OutOfMemoryError as error:
            if not (self._may_divide and divides(micro)):
                raise
            problem = str(error)
        loss, most = self._in_parts(micro, problem, step=step, counted=self.items.samples > counted, last=last)
        self.balance.ran_out(most, step=step)
        self.meter.lap("backward")
        return loss

    def _pass(self, micro: MicroBatch, *, step: int, last: bool) -> Tensor | float:
        """Make a forward and a backward pass; return the summed loss."""
        batch = self._to_device(micro.batch)
        self.meter.lap("h2d")
        if self.compilation.due:
            with self.meter.excluded("compile"):
                self.compilation.begin(batch, step=step)
        keeps_buffers = nullcontext() if micro.samples else keep_buffers(self.strategy.module)
        try:
            # Only the last micro-batch reduces gradients.
            with self.strategy.micro_step(last=last), self.flops.count(batch, micro.samples), keeps_buffers:
                loss, weight, value = self._loss(self.strategy.model, batch, micro.samples, step=step, last=last)
                self.meter.lap("forward")
                self.flops.begin_backward()
                _run_backward(loss, weight)
                self.meter.lap("backward")
        except (RuntimeError, MemoryError) as error:
            self.use.raise_unused(error)
            raise_out_of_memory(error, batch, step=step)
            raise
        return value

    def _loss(
        self, model: nn.Module, batch: Any, samples: int, *, step: int, last: bool, counts: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return the loss [] of a batch as it is differentiated, what its backward pass begins with, and its sum."""
        with self.autocast:
            loss, count, metrics = summed_loss(self.task, model, batch)
        if counts:
            if samples:
                self.metrics.add(metrics, count)
            loss = self.items.add(loss, count, samples, last=last)
        value = self.finite.require_loss(loss, batch, step=step)
        return self.scaler.scale(loss), self.items.weight(loss), value

    def _in_parts(
        self, micro: MicroBatch, problem: str, *, step: int, counted: bool, last: bool
    ) -> tuple[Tensor | float, int]:
        """Return the summed loss of a micro-batch whose pass has failed, and the most samples that memory holds.

        Some parameters may have their gradient from that pass, and other ranks may wait for their buckets. The rest is
        computed in parts, to within an eighth of what memory holds, without DDP; only then it is given to the
        parameters, at which DDP goes on as in a backward pass. ``counted``: whether the pass had come to that.

        Raises:
            OutOfMemoryError: the memory does not hold one sample.
        """
        before = self._before or [-1] * len(self.parameters)
        rest = [each for each, had in zip(self.parameters, before, strict=True) if _version(each) == had]
        total: list[Tensor | None] = [None] * len(rest)
        value: Tensor | float = 0.0
        most, at, counted_to = micro.samples, 0, micro.samples if counted else 0
        while at < micro.samples:
            if problem:
                if most == 1:
                    message = f"the memory of rank {self.ctx.rank} does not hold one sample: {problem}"
                    raise OutOfMemoryError(message, step=step)
                most = max(most * 7 // 8, 1)
                gc.collect()  # the error held the tensors of the pass
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            end = min(at + most, counted_to if at < counted_to else micro.samples)
            problem, loss, counts = "", None, end > counted_to  # without a loss: it holds the tensors of a failed pass
            try:
                batch = self._to_device(part_of(micro, at, end).batch)
                ends = last and end == micro.samples
                loss, weight, part = self._loss(
                    self.strategy.module, batch, end - at, step=step, last=ends, counts=counts
                )
                counted_to = max(counted_to, end)
                found = torch.autograd.grad(loss, rest, weight, allow_unused=True)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error)
                continue
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, found, strict=True)]
            value, at = value + part, end
        used = [(each, gradient) for each, gradient in zip(rest, total, strict=True) if gradient is not None]
        model = self.strategy.model
        if last and isinstance(model, DDP) and len(rest) == len(self.parameters):
            model.reducer.prepare_for_backward([])  # the forward pass may have failed before it
        if used:
            torch.autograd.backward([each for each, _ in used], [gradient for _, gradient in used])
        return value, most


def _version(parameter: nn.Parameter) -> int:
    return -1 if parameter.grad is None else parameter.grad._version


def _run_backward(loss: Tensor, weight: Tensor) -> None:
    """Make the backward pass of a loss, beginning with a weight of its shape.

    ``loss.backward(weight)`` does the same after it has compared the shapes in Python: 15 us of each step, and half a
    second of the first one, which imports sympy for that.
    """
    _engine_run_backward((loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True)
