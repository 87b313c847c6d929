"""Ends training at a non-finite loss or gradient, and names the module that first produced it.

The module is found by running the offending batch once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainer import distributed
from trainer.contract.errors import TrainingError
from trainer.tasks.task import Task
from trainer.telemetry.step_meter import StepMeter


class NonFiniteError(TrainingError):
    """A loss or gradient is infinite or not a number."""


class FiniteCheck:
    """Looks at every loss and every gradient before the optimizer steps.

    On a CPU looking costs microseconds. On a GPU it would stop the queue: there the losses are looked at as soon as
    their values have been copied, and a gradient shows in the next loss.

    Args:
        task: computes the loss once more to find the place.
        model: the task's own module.
        meter: has the losses that have been copied.
        autocast: the precision of the forward pass; an overflow in it does not show in another one.
        scaled: whether a loss scaler looks at the gradients itself and leaves a step out.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        meter: StepMeter,
        *,
        autocast: AbstractContextManager[Any],
        scaled: bool,
    ) -> None:
        self._task = task
        self._model = model
        self._autocast = autocast
        self._meter = meter
        self._scaled = scaled
        self._batch: Any = None

    def require_loss(self, loss: Tensor, batch: Any, *, step: int) -> Tensor | float:
        """End this rank before its bad loss [] of this batch reaches the others.

        Returns:
            The loss, apart from the graph: a number on a CPU, where it has been looked at, else a tensor [].

        Raises:
            NonFiniteError: with the step and the place.
        """
        self._batch = batch
        now = step
        if loss.device.type == "cpu":
            if math.isfinite(value := loss.item()):
                return value
        elif not (latest := self._meter.latest) or latest.loss is None or math.isfinite(latest.loss):
            return loss.detach()
        else:
            step = latest.step
        if where := self._locate():
            raise NonFiniteError(f"non-finite loss at step {step}: first in {where}")
        again = (
            "the same batch computed again gives" if now == step else f"only the batch of step {now} is left, and gives"
        )
        raise NonFiniteError(
            f"non-finite loss at step {step}: {again} finite numbers, so no module can be named; computing it again "
            "draws random numbers, such as dropout's, anew"
        )

    def require_gradient(self, norm: Tensor, *, step: int) -> Tensor | float:
        """Refuse to step on a gradient whose norm [] is not finite; all ranks have the same one and look for it.

        Returns:
            The norm: a number on a CPU, where it has been looked at, else as it is.

        Raises:
            NonFiniteError: with the step and the places.
        """
        if self._scaled or norm.device.type != "cpu":
            return norm
        if math.isfinite(value := norm.item()):
            return value
        found = distributed.all_gather_list(self._locate())
        culprits = [f"{where} on rank {rank}" for rank, where in enumerate(found) if where]
        if culprits:
            raise NonFiniteError(f"non-finite gradient at step {step}: first in {'; '.join(culprits)}")
        raise NonFiniteError(
            f"non-finite gradient at step {step}: {self._seen_in_gradients()}; the last batch of each rank computed "
            "again gives finite gradients, so the module where it began cannot be named"
        )

    def _locate(self) -> str:
        with self._autocast:
            return locate(self._task, self._model, self._batch)

    def _seen_in_gradients(self) -> str:
        """Say what the gradients that were reduced show."""
        # Backward runs from the last module to the first, so the last bad parameter is nearest to where it began.
        for name, parameter in reversed(list(self._model.named_parameters())):
            if parameter.grad is not None and not _finite(parameter.grad):
                return f"it is in the gradient of {name}"
        return "every gradient is finite, only their norm is too large for its number format"


def locate(task: Task, model: nn.Module, batch: Any) -> str:
    """Say where the first non-finite number of a forward and backward pass appears.

    The pass runs on the unwrapped model, so no other rank takes part. Dropout draws anew; what comes from data or
    parameters shows again.

    Returns:
        For people: ``output of blocks.3.mlp``, ``gradient of embedding.weight``; empty where every number is finite.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _finite(tensor):
            return f"parameter {name}"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_output_hook(name, found))
        for name, module in model.named_modules()
        if next(module.children(), None) is None
    ]
    try:
        loss, _, _ = task.loss(model, batch)
        if found:
            return found[0]
        if not _finite(loss):
            return "the loss itself, from finite outputs"
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Backward runs from the last module to the first, so the last bad parameter is where it began.
    for name, gradient in reversed(list(zip(names, gradients, strict=True))):
        if gradient is not None and not _finite(gradient):
            return f"gradient of {name}"
    return ""


def _output_hook(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(isinstance(tensor, Tensor) and not _finite(tensor) for tensor in outputs):
            found.append(f"output of {name or type(module).__name__} ({type(module).__name__})")

    return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
