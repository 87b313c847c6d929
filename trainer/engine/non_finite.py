"""Detection of a non-finite loss, gradient or parameter, and of the module that first produced it.

The module is found by running the offending batch once more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import distributed
from trainer.contract.errors import RequestError, TrainingError
from trainer.distributed.host_copies import HostCopies, HostCopy
from trainer.engine.ddp_model import Strategy, values_of
from trainer.tasks.task import Task, summed_loss

AGAIN = "random numbers such as dropout differ between the two passes: lower --lr, or set --clip-norm"
"""Reasons why the same batch may give finite numbers when it is computed again, and advice."""


class NonFiniteError(TrainingError):
    """A loss, gradient or parameter is infinite or not a number.

    ``step``: in which it is, from 1; None for a test at the end.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, kw_only=True)
class _PendingNumber:
    """Number on its way to the host, and the batch from which it can be computed again."""

    kind: Literal["loss", "gradient", "count", "items"]
    step: int
    batch: Any
    copy: HostCopy
    samples: int = 0


class FiniteCheck:
    """Check of every loss and every gradient.

    On a CPU each is checked at once, which costs microseconds. On a GPU that would be a sync point at every step: there
    a number is checked when its copy has arrived on the host, and waited for only before an evaluation and a save
    (``require_all``). Until then the optimizer is kept from spreading it: after a gradient that is not finite it does
    nothing or gets zeros, so that the parameters stay finite and the batch computed again shows the module.

    A sharded model computes no batch again, which would take all ranks: then no module is named.

    With ``scaled`` a loss scaler checks the gradients itself and leaves steps out. ``copies`` is None on a CPU.
    """

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        autocast: AbstractContextManager[Any],
        *,
        scaled: bool,
        copies: HostCopies | None,
    ) -> None:
        model = strategy.module
        self._task = task
        self._model = model
        self._sharded = strategy.sharded
        self._autocast = autocast
        self._scaled = scaled
        self._copies = copies
        self._batch: Any = None
        self._unread: deque[_PendingNumber] = deque()
        self._bad: _PendingNumber | None = None
        """The first number found bad: a loss or gradient that is not finite, or a count of 0 or of other items."""
        self._bad_text = ""
        """The message about it, if it is a count."""
        self._overflowed: Tensor | None = None
        # Without buffers that begin with infinities, such as a mask.
        self._checked_names = [
            *(name for name, parameter in model.named_parameters() if parameter.requires_grad),
            *(name for name, buffer in model.named_buffers() if _finite(buffer)),
        ]

    def require_loss(self, loss: Tensor, batch: Any, *, step: int) -> Tensor | float:
        """Raise if this rank's loss [] is not finite, before it reaches the others; on a GPU check it later."""
        self._batch = batch
        if self._copies is not None:
            self._check_later("loss", loss, step, self._copies)
            return loss.detach()
        if math.isfinite(value := loss.item()):
            return value
        raise NonFiniteError(self._loss_message(step, self._locate(batch)), step=step)

    def require_gradient(self, norm: Tensor | float, optimizer: Optimizer, *, step: int) -> Tensor | float:
        """Raise if the norm [] of the gradients, equal on all ranks, is not finite; on a GPU check it later."""
        if self._scaled:
            return norm
        if self._copies is not None:
            assert isinstance(norm, Tensor)
            self._check_later("gradient", norm, step, self._copies)
            # True of infinities and of what is not a number, by half as many kernels as ``isfinite`` takes.
            overflowed = norm - norm != 0
            self._overflowed = overflowed if self._overflowed is None else self._overflowed | overflowed
            self._keep_from_stepping(optimizer, self._overflowed)
            return norm
        if math.isfinite(value := float(norm)):
            return value
        raise NonFiniteError(self._gradient_message(step, self._batch), step=step)

    def require_count(self, count: Tensor | float, *, step: int) -> Tensor | float:
        """Raise if the items of all ranks in a step, [], are not above 0; if they are on a GPU, check it later."""
        if self._copies is not None and isinstance(count, Tensor):
            self._check_later("count", count, step, self._copies)
            return count
        if (value := float(count)) <= 0:
            raise TrainingError(_no_item(step))
        return value

    def require_items(self, count: Tensor | float, *, samples: int, step: int) -> None:
        """Raise unless the count of this rank's losses follows from ``count_per_sample``; on a GPU check it later."""
        if self._copies is not None and isinstance(count, Tensor):
            self._check_later("items", count, step, self._copies, samples=samples)
        elif not self._is_count(float(count), samples):
            raise RequestError(self._count_message(float(count), samples, step))

    def require_scale(self, scale: float, least: float, *, step: int, left_out: int) -> None:
        """Raise on all ranks if the loss scale is below the least one, where no step will be taken any more."""
        if scale < least:
            raise NonFiniteError(
                f"the loss scale is {scale:.3g}, below --min-loss-scale {least:g}, and {left_out} steps in a row were "
                f"skipped: {self._gradient_message(step, self._batch)}",
                step=step,
            )

    def found_bad(self) -> bool:
        """Check the numbers that have arrived; return whether one is bad. Never waits."""
        while self._bad is None and self._unread and self._unread[0].copy.arrived():
            self._check(self._unread.popleft())
        return self._bad is not None

    def require_all(self, *, step: int) -> None:
        """Wait for all numbers up to this step and check them, parameters and buffers; every rank calls this."""
        while self._bad is None and self._unread:
            self._check(self._unread.popleft())
        bad, tensor = self._bad, "" if self._bad else self._first_bad_tensor()
        ranks = distributed.all_gather_list([bad.kind, bad.step, self._bad_text] if bad else ["state", step, tensor])
        numbers = [(at, kind, text) for kind, at, text in ranks if kind != "state"]
        if numbers:
            at, kind, text = min(numbers, key=lambda number: (number[0], number[1] != "loss"))
            if text:
                raise (RequestError if kind == "items" else TrainingError)(text)
            batch = bad.batch if bad and bad.step == at else None
            if kind == "gradient":
                raise NonFiniteError(self._gradient_message(at, batch), step=at)
            bad_loss = bad is not None and (bad.step, bad.kind) == (at, "loss")
            raise NonFiniteError(self._loss_message(at, self._places(batch if bad_loss else None)), step=at)
        if places := [f"{where} on rank {rank}" for rank, (_, _, where) in enumerate(ranks) if where]:
            raise NonFiniteError(
                f"non-finite model after step {step}, though every loss and gradient was finite: first in "
                f"{'; '.join(places)}; {_remedy('parameter')}",
                step=step,
            )

    def _keep_from_stepping(self, optimizer: Optimizer, overflowed: Tensor) -> None:
        if all(group.get("fused") for group in optimizer.param_groups):
            # GradScaler sets these attributes on a fused optimizer, whose kernel then does nothing.
            optimizer.found_inf, optimizer.grad_scale = overflowed.to(torch.float32), None  # type: ignore[attr-defined]
            return
        for parameter in self._model.parameters():
            if (gradient := parameter.grad) is not None:
                values_of(gradient).masked_fill_(overflowed, 0.0)

    def _check_later(
        self,
        kind: Literal["loss", "gradient", "count", "items"],
        value: Tensor,
        step: int,
        copies: HostCopies,
        *,
        samples: int = 0,
    ) -> None:
        self.found_bad()  # frees the batches whose numbers have arrived
        copy = copies.begin(value)
        self._unread.append(_PendingNumber(kind=kind, step=step, batch=self._batch, copy=copy, samples=samples))

    def _check(self, number: _PendingNumber) -> None:
        value = number.copy.numbers()[0]
        match number.kind:
            case "count":
                good, text = value > 0, _no_item(number.step)
            case "items":
                good = self._is_count(value, number.samples)
                text = self._count_message(value, number.samples, number.step)
            case _:
                good, text = math.isfinite(value), ""
        if not good:
            self._bad, self._bad_text = number, text

    def _is_count(self, count: float, samples: int) -> bool:
        # A count in 32-bit floats may be rounded.
        return math.isclose(count, samples * (self._task.count_per_sample or 0), rel_tol=1e-6)

    def _count_message(self, count: float, samples: int, step: int) -> str:
        kind, per_sample = type(self._task).__name__, self._task.count_per_sample or 0
        return (
            f"step {step}: {kind}.loss() counts {count:.10g} items in {samples} samples, but count_per_sample = "
            f"{per_sample} makes them {samples * per_sample}, by which the gradients would be divided: correct one of "
            "them, or set count_per_sample = None, with which the ranks sum their counts at each step"
        )

    def _gradient_message(self, step: int, batch: Any) -> str:
        """Return the message about a step's bad gradient; every rank computes its batch of that step again."""
        if places := self._places(batch):
            return f"non-finite gradient at step {step}: first in {places}; {_remedy(places)}"
        return (
            f"non-finite gradient at step {step}: {self._describe_gradients()}; {self._unnamed('finite gradients')}, "
            "so the module where it began cannot be named; lower --lr"
        )

    def _loss_message(self, step: int, places: str) -> str:
        if places:
            return f"non-finite loss at step {step}: first in {places}; {_remedy(places)}"
        advice = "lower --lr, or set --clip-norm" if self._sharded else AGAIN
        return f"non-finite loss at step {step}: {self._unnamed('finite numbers')}, so no module can be named; {advice}"

    def _unnamed(self, result: str) -> str:
        if self._sharded:
            return "a batch of a model that is divided among the ranks is not computed again"
        return f"the same batch computed again gives {result}"

    def _places(self, batch: Any) -> str:
        """Have each rank compute its batch, if any, again; return the places of bad numbers. All ranks call this."""
        places = distributed.all_gather_list("" if batch is None else self._locate(batch))
        return "; ".join(f"{place} on rank {rank}" for rank, place in enumerate(places) if place)

    def _locate(self, batch: Any) -> str:
        if self._sharded:
            return ""
        with self._autocast:
            return locate(self._task, self._model, batch)

    def _describe_gradients(self) -> str:
        """Describe the non-finite one of the reduced gradients that is nearest to its origin."""
        # Backward runs from the last module to the first, so the last bad parameter is nearest to where it began.
        for name, parameter in reversed(list(self._model.named_parameters())):
            if parameter.grad is not None and not _finite(parameter.grad):
                return f"it is in the gradient of {name}"
        if self._copies is not None:
            return "a GPU's gradients are no longer available when the result is checked"
        return "every gradient is finite, but their norm is too large for its number format"

    def _first_bad_tensor(self) -> str:
        tensors = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters())}
        # One result for all of them: on a GPU each one read is a sync point.
        floats = [values_of(tensors[name]) for name in self._checked_names if tensors[name].is_floating_point()]
        if not floats or bool(torch.stack([torch.isfinite(tensor).all() for tensor in floats]).all()):
            return ""
        return next(name for name in self._checked_names if not _finite(tensors[name]))


def _no_item(step: int) -> str:
    return f"step {step}: loss() returned a count of 0 on every rank"


def locate(task: Task, model: nn.Module, batch: Any) -> str:
    """Return the place of the first non-finite number in a forward and backward pass.

    The pass runs on the unwrapped model, so no other rank takes part. Dropout draws new random numbers; a fault in the
    data or the parameters shows again.

    Returns:
        Text for messages: ``output of blocks.3.mlp``, ``gradient of embedding.weight``; empty if all are finite.
    """
    # Not the buffers: the batch may have spoiled a batch norm's statistics, and the effect of a bad one shows below.
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
    bad_outputs: list[str] = []
    handles = [
        module.register_forward_hook(_output_hook(name, bad_outputs))
        for name, module in model.named_modules()
        if next(module.children(), None) is None
    ]
    try:
        loss, _, _ = summed_loss(task, model, batch)
        if bad_outputs:
            return bad_outputs[0]
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


REMEDIES = {
    "parameter": "most likely the learning rate is too high for the steps before: lower --lr, or set --clip-norm",
    "output": "most likely the learning rate is too high: lower --lr, set --clip-norm, or take bf16 instead of fp16; "
    "otherwise look for a non-finite or very large number in this batch",
    "the loss": "most likely the learning rate is too high: lower --lr; otherwise look for the logarithm of 0, or a "
    "division by 0, where the task computes its loss",
    "gradient": "most likely the learning rate is too high: lower --lr; otherwise look for a square root or logarithm "
    "of 0, or a division by 0, there or in what comes after it",
}
"""Advice by the beginning of a place that ``locate`` returns."""


def _remedy(places: str) -> str:
    return next(text for place, text in REMEDIES.items() if places.startswith(place))


def _output_hook(name: str, bad_outputs: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(isinstance(tensor, Tensor) and not _finite(tensor) for tensor in outputs):
            bad_outputs.append(f"output of {name or type(module).__name__} ({type(module).__name__})")

    return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(values_of(tensor)).all())
