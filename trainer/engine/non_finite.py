"""Ends training at a non-finite loss, gradient or parameter, and names the module that first produced it.

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
from trainer.contract.errors import TrainingError
from trainer.distributed.host_copies import HostCopies, HostCopy
from trainer.tasks.task import Task, summed_loss

AGAIN = (
    "dropout and other random numbers were drawn anew, or the number came from one of them: lower --lr, or set "
    "--clip-norm"
)
"""Why the same batch may give finite numbers the next time, and what to try."""


class NonFiniteError(TrainingError):
    """A loss, gradient or parameter is infinite or not a number."""


@dataclass(frozen=True, kw_only=True)
class _Number:
    """A number that has not been looked at yet, and with what it can be computed again."""

    kind: Literal["loss", "gradient", "count"]
    step: int
    batch: Any
    copy: HostCopy


class FiniteCheck:
    """Looks at every loss and every gradient.

    On a CPU that happens at once and costs microseconds. On a GPU it would stop the queue at every step: there a
    number is looked at when it has arrived on the host, and waited for only before an evaluation and a save
    (``require_all``). Until then the optimizer is kept from spreading it: after a gradient that is not finite it does
    nothing or gets zeros, so that the parameters stay finite and the batch computed again shows the module.

    Args:
        task: computes the loss once more to find the place.
        model: the task's own module.
        autocast: the precision of the forward pass; an overflow in it does not show in another one.
        scaled: whether a loss scaler looks at the gradients itself and leaves a step out.
        copies: brings numbers from the device; None where they are on the host.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        *,
        autocast: AbstractContextManager[Any],
        scaled: bool,
        copies: HostCopies | None,
    ) -> None:
        self._task = task
        self._model = model
        self._autocast = autocast
        self._scaled = scaled
        self._copies = copies
        self._batch: Any = None
        self._unread: deque[_Number] = deque()
        self._bad: _Number | None = None
        """The first that is not finite, once it has been looked at."""
        self._overflowed: Tensor | None = None
        """Whether a gradient was not finite, [] on the device."""
        # A mask may hold infinities from the beginning.
        self._state = [
            *(name for name, parameter in model.named_parameters() if parameter.requires_grad),
            *(name for name, buffer in model.named_buffers() if _finite(buffer)),
        ]

    def require_loss(self, loss: Tensor, batch: Any, *, step: int) -> Tensor | float:
        """End this rank before its bad loss [] of this batch reaches the others, where that needs no waiting.

        Returns:
            The loss, apart from the graph: a number on a CPU, where it has been looked at, else a tensor [].

        Raises:
            NonFiniteError: with the step and the place.
        """
        self._batch = batch
        if self._copies is not None:
            self._look_later("loss", loss, step, self._copies)
            return loss.detach()
        if math.isfinite(value := loss.item()):
            return value
        if where := self._locate(batch):
            raise NonFiniteError(f"non-finite loss at step {step}: first in {where}; {remedy(where)}")
        raise NonFiniteError(
            f"non-finite loss at step {step}: the same batch computed again gives finite numbers, so no module can be "
            f"named; {AGAIN}"
        )

    def require_gradient(self, norm: Tensor, optimizer: Optimizer, *, step: int) -> Tensor | float:
        """Refuse to step on gradients whose norm [] is not finite; all ranks have the same one and look for it.

        Returns:
            The norm: a number on a CPU, where it has been looked at, else as it is.

        Raises:
            NonFiniteError: with the step and the places.
        """
        if self._scaled:
            return norm
        if self._copies is not None:
            self._look_later("gradient", norm, step, self._copies)
            overflowed = ~torch.isfinite(norm)
            self._overflowed = overflowed if self._overflowed is None else self._overflowed | overflowed
            self._keep_from_stepping(optimizer, self._overflowed)
            return norm
        if math.isfinite(value := norm.item()):
            return value
        raise NonFiniteError(self._gradient_trouble(step, self._batch))

    def require_count(self, count: Tensor, *, step: int) -> None:
        """Look later at the items of all ranks in a step, [] on a GPU; a step without any is none.

        ``require_all`` raises what was found.
        """
        assert self._copies is not None
        self._look_later("count", count, step, self._copies)

    def require_scale(self, scale: float, least: float, *, step: int, left_out: int) -> None:
        """End all ranks when the loss scale has fallen below the least one: no step will be taken any more.

        Raises:
            NonFiniteError: with the step and the places.
        """
        if scale < least:
            raise NonFiniteError(
                f"the loss scale is {scale:.3g}, below --min-loss-scale {least:g}, and {left_out} steps in a row were "
                f"left out: {self._gradient_trouble(step, self._batch)}"
            )

    def seen(self) -> bool:
        """Return whether a number that has arrived is not finite; never waits."""
        while self._bad is None and self._unread and self._unread[0].copy.arrived():
            self._look(self._unread.popleft())
        return self._bad is not None

    def require_all(self, *, step: int) -> None:
        """Wait for all numbers up to this step, and look at the parameters too; every rank takes part.

        Raises:
            NonFiniteError: on all ranks, if one of them has found something; with the step and the places.
            TrainingError: the losses of a step counted no item.
        """
        while self._bad is None and self._unread:
            self._look(self._unread.popleft())
        bad, state = self._bad, "" if self._bad else self._bad_state()
        told = distributed.all_gather_list([bad.kind, bad.step, ""] if bad else ["state", step, state])
        numbers = [(at, kind) for kind, at, _ in told if kind != "state"]
        if numbers:
            at, kind = min(numbers, key=lambda number: (number[0], number[1] != "loss"))
            if kind == "count":
                raise TrainingError(no_item(at))
            batch = bad.batch if bad and bad.step == at else None
            if kind == "gradient":
                raise NonFiniteError(self._gradient_trouble(at, batch))
            bad_loss = bad is not None and (bad.step, bad.kind) == (at, "loss")
            places = self._places(batch if bad_loss else None)
            raise NonFiniteError(
                f"non-finite loss at step {at}: "
                + (
                    f"first in {places}; {remedy(places)}"
                    if places
                    else f"the same batch computed again gives finite numbers, so no module can be named; {AGAIN}"
                )
            )
        if found := [f"{where} on rank {rank}" for rank, (_, _, where) in enumerate(told) if where]:
            raise NonFiniteError(
                f"non-finite model after step {step}, though every loss and gradient was finite: first in "
                f"{'; '.join(found)}; {remedy('parameter')}"
            )

    def _keep_from_stepping(self, optimizer: Optimizer, overflowed: Tensor) -> None:
        """Have the optimizer change no parameter once a gradient was not finite, [] on the device."""
        if all(group.get("fused") for group in optimizer.param_groups):
            # What GradScaler tells a fused optimizer, whose kernel then does nothing.
            optimizer.found_inf, optimizer.grad_scale = overflowed.to(torch.float32), None  # type: ignore[attr-defined]
            return
        for parameter in self._model.parameters():
            if (gradient := parameter.grad) is not None:
                (gradient._values() if gradient.is_sparse else gradient).masked_fill_(overflowed, 0.0)

    def _look_later(
        self, kind: Literal["loss", "gradient", "count"], value: Tensor, step: int, copies: HostCopies
    ) -> None:
        self.seen()  # lets go of the batches whose numbers are here
        self._unread.append(_Number(kind=kind, step=step, batch=self._batch, copy=copies.begin(value)))

    def _look(self, number: _Number) -> None:
        value = number.copy.numbers()[0]
        if not (value > 0 if number.kind == "count" else math.isfinite(value)):
            self._bad = number

    def _gradient_trouble(self, step: int, batch: Any) -> str:
        """Say where the gradient of a step became non-finite; every rank looks into its batch of that step."""
        if places := self._places(batch):
            return f"non-finite gradient at step {step}: first in {places}; {remedy(places)}"
        return (
            f"non-finite gradient at step {step}: {self._seen_in_gradients()}; the last batch of each rank computed "
            "again gives finite gradients, so the module where it began cannot be named; lower --lr"
        )

    def _places(self, batch: Any) -> str:
        found = distributed.all_gather_list("" if batch is None else self._locate(batch))
        return "; ".join(f"{where} on rank {rank}" for rank, where in enumerate(found) if where)

    def _locate(self, batch: Any) -> str:
        with self._autocast:
            return locate(self._task, self._model, batch)

    def _seen_in_gradients(self) -> str:
        """Say what the gradients that were reduced show."""
        # Backward runs from the last module to the first, so the last bad parameter is nearest to where it began.
        for name, parameter in reversed(list(self._model.named_parameters())):
            if parameter.grad is not None and not _finite(parameter.grad):
                return f"it is in the gradient of {name}"
        if self._copies is not None:
            return "a GPU's gradients are not kept until they are looked at"
        return "every gradient is finite, only their norm is too large for its number format"

    def _bad_state(self) -> str:
        tensors = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters())}
        # One answer for all of them: on a GPU each question would be waited for.
        finite = [torch.isfinite(tensors[name]).all() for name in self._state if tensors[name].is_floating_point()]
        if not finite or bool(torch.stack(finite).all()):
            return ""
        return next(name for name in self._state if not _finite(tensors[name]))


def no_item(step: int) -> str:
    """Say that nothing counted in a step."""
    return f"step {step}: the loss of every rank counts no item"


def locate(task: Task, model: nn.Module, batch: Any) -> str:
    """Say where the first non-finite number of a forward and backward pass appears.

    The pass runs on the unwrapped model, so no other rank takes part. Dropout draws anew; what comes from data or
    parameters shows again.

    Returns:
        For people: ``output of blocks.3.mlp``, ``gradient of embedding.weight``; empty where every number is finite.
    """
    # Not the buffers: a batch norm's statistics have the number from the batch, and what a bad one does shows below.
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_output_hook(name, found))
        for name, module in model.named_modules()
        if next(module.children(), None) is None
    ]
    try:
        loss, _, _ = summed_loss(task, model, batch)
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


REMEDIES = {
    "parameter": "an update before has made it so: lower --lr, or set --clip-norm",
    "output": "look for such a number, or one out of all proportion, in this batch; if there is none, lower --lr, set "
    "--clip-norm, or take bf16 instead of fp16",
    "the loss": "look for the logarithm of 0, or a division by 0, where the task computes its loss",
    "gradient": "look for a square root or logarithm of 0, or a division by 0, there or in what comes after it; if "
    "there is none, lower --lr",
}
"""By the place where the first number that is not finite appears, as ``locate`` names it."""


def remedy(places: str) -> str:
    """Return what to try, by the first of some places."""
    return next(text for place, text in REMEDIES.items() if places.startswith(place))


def _output_hook(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(isinstance(tensor, Tensor) and not _finite(tensor) for tensor in outputs):
            found.append(f"output of {name or type(module).__name__} ({type(module).__name__})")

    return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
