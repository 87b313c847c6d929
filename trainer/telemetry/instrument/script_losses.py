"""Losses of a step: the numbers on which a script calls backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from trainer.telemetry.clocks import Scalar


class StepLosses:
    """Losses of the step so far.

    The loss of a step is the sum of the scalars on which backward was called, before a GradScaler scaled them: the
    step's gradient is the gradient of that sum. Scripts that accumulate divide by the number of passes, which makes it
    their mean. Where an optimizer calls its closure several times, as LBFGS does, it is the sum in the first call, at
    the parameters from before the step, which is what these optimizers return.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor | float | None] = []
        """None for one that cannot be read."""
        self._unread = ""
        """On what the last backward pass was called whose loss is not known."""
        self._is_of_outputs = False
        """Whether the losses of the step are those of a model's outputs, whose gradients the script keeps and hands to
        the model in further passes, in each of which backward is called on their product with the outputs."""
        self._before = 0
        """Number of losses before the last backward pass."""
        self._after_closure: int | None = None
        """Number of losses after the first call of the closure in an optimizer's step; None before its end."""
        self._scaled: list[tuple[Any, Tensor]] = []
        """References to losses that a GradScaler has scaled since the last backward pass on one, each with the loss."""
        self._scale: Tensor | None = None
        """The scale."""

    def scale(self, scaled: Any, loss: Any, scale: Any) -> None:
        self._scale = scale.detach().clone() if isinstance(scale, Tensor) else None
        for after, before in ((scaled, loss),) if isinstance(loss, Tensor) else zip(scaled, loss, strict=False):
            if isinstance(after, Tensor) and isinstance(before, Tensor):
                self._scaled.append((ref(after), before.detach()))

    def add(self, outputs: Sequence[Tensor], *, called: bool) -> Tensor | None:
        """Add the tensors on which backward is called, if they are numbers; return their scale, None without one.

        ``called``: whether a model was called for them.
        """
        self._before = len(self._losses)
        ends_in_parameters = called or any(map(_ends_in_parameters, outputs))
        self._is_of_outputs |= not ends_in_parameters and not self._losses
        pending, self._scaled = self._scaled, []
        for output in outputs:
            loss = next((loss for scaled, loss in pending if scaled() is output), output) if pending else output
            if pending and loss is output and self._scale is not None:
                loss = output.detach() / self._scale  # made of scaled losses, such as their sum: it is scaled alike
            elif loss is not output:
                self._scaled = [each for each in pending if each[0]() is not None and each[0]() is not output]
            if not (self._is_of_outputs and ends_in_parameters):
                self._add(loss)
        return self._scale if pending else None

    def _add(self, loss: Tensor) -> None:
        if loss.numel() == 1 and loss.is_floating_point():
            self._losses.append(_number(loss))
            if self._losses[-1] is None:
                self._unread = f"a {type(loss).__name__} of which this rank has a part"
        else:
            self._unread = "a tensor of several values"

    @property
    def unseen(self) -> str:
        """Why losses are not known, and how they would be; empty if all are."""
        how = "call it on one number, or give a loss to watched.report(loss=…) of trainer.watch"
        return self._unread and f"backward() was called on {self._unread} ({how})"

    def remove_last(self) -> None:
        """Remove what the last backward pass added, because it failed."""
        del self._losses[self._before :]

    def divide(self, divisor: float) -> None:
        """Divide the losses so far, because their gradients were divided."""
        self._losses = [loss if loss is None else loss / divisor for loss in self._losses]

    def end_closure(self) -> bool:
        """End a call of an optimizer's closure; return whether it was the first one of the step."""
        first = self._after_closure is None
        if first:
            self._after_closure = len(self._losses)
        del self._losses[self._after_closure :]
        return first

    def end_optimizer(self) -> None:
        self._after_closure = None

    def total(self, device: torch.device) -> Scalar:
        """Return the loss of the step.

        None if one of the losses cannot be read, or is on another device: copying it would wait for that.
        """
        numbers = [loss for loss in self._losses if isinstance(loss, float)]
        tensors = [loss for loss in self._losses if isinstance(loss, Tensor) and loss.device.type == device.type]
        if numbers and len(numbers) == len(self._losses):
            return sum(numbers)
        if tensors and len(tensors) == len(self._losses):
            return tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum()
        if None not in self._losses and self._losses:
            self._unread = "a tensor of another device than the model's"
        return None

    def clear(self) -> None:
        self._losses, self._is_of_outputs = [], False


def _ends_in_parameters(output: Tensor) -> bool:
    """Whether a backward pass gives a parameter a gradient, as far as autograd's graph tells."""
    nodes: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        nodes += [each for each, _ in node.next_functions]
    return False


def _number(output: Tensor) -> Tensor | float | None:
    """Return a loss as a number, on a GPU as a copy of it; None where reading it may take a collective."""
    if type(output).__name__ == "DTensor":  # by its name: importing it takes long
        distributed: Any = output
        if not all(placement.is_replicate() for placement in distributed.placements):
            return None
        output = distributed._local_tensor
    if type(output) is not Tensor:
        return None
    # Only on the host can the number be read without waiting for it.
    if output.device.type == "cpu":
        return output.item()
    return output.detach().reshape(()).to(torch.float32, copy=True)


def newest_number(output: Any, depth: int = 2) -> int | None:
    """Return the place in autograd's order of the newest number in a model's output; None without one."""
    if isinstance(output, Tensor):
        if output.grad_fn is None or output.numel() != 1:
            return None
        return int(output.grad_fn._sequence_nr())
    if isinstance(output, Mapping):
        output = output.values()
    elif not isinstance(output, Sequence) or isinstance(output, str | bytes):
        return None
    places = [newest_number(value, depth - 1) for value in output] if depth else []
    return max((place for place in places if place is not None), default=None)


def is_made_of(loss: Tensor, place: int | None) -> bool:
    """Whether a loss is a number in the model's output of this place, perhaps scaled or divided, with no more to it."""
    few_operations = 4  # maximum operations of a scaling: a loss that is computed outside of the model takes more
    if place is None or loss.grad_fn is None:
        return False
    return bool(0 <= loss.grad_fn._sequence_nr() - place <= few_operations)
