"""Averages of the weights, which are validated, tested and saved; training uses the plain weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.engine.ddp_model import values_of


def weight_average(model: nn.Module, optimizer: Optimizer, options: Training) -> WeightAverage:
    """Return the average of a training's weights: that of a schedule-free optimizer, or else that of the options."""
    if "train_mode" not in optimizer.param_groups[0]:
        return WeightAverage(model, decay=options.ema_decay, start=options.ema_start)
    if options.ema_decay:
        raise RequestError(f"--ema-decay averages the weights, as {type(optimizer).__name__} does itself: leave it out")
    return ScheduleFreeAverage(model, optimizer)


class WeightAverage:
    """The exponential moving average of a model's trained weights over the updates; with a decay of 0 there is none.

    It is equal to the weights for the first ``start`` updates; each later one makes it ``decay`` of itself and
    ``1 - decay`` of the weights.
    """

    def __init__(self, model: nn.Module, *, decay: float, start: int = 0) -> None:
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad and decay}
        self._names = list(named)
        self._weights: list[Tensor] = list(named.values())
        self._average = [weight.detach().clone() for weight in self._weights]
        self._decay = decay
        self._start = start
        self.enabled = decay > 0

    def begin(self) -> None:
        for average, weight in zip(self._average, self._weights, strict=True):
            average.copy_(weight.detach())

    def update(self, step: int) -> None:
        """Take the weights after update ``step``, from 1, into the average."""
        if self.enabled:
            with torch.no_grad():  # no decorator: without an average, it would be most of the call
                average, weights = self._values()
                torch._foreach_lerp_(average, weights, 1.0 - self._decay if step > self._start else 1.0)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the contents of weights and average in place, so that references to the weights stay valid."""
        if self.enabled:
            average, weights = self._values()
            before = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, average)
            torch._foreach_copy_(average, before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def _values(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return average and weights, of a sharded model this rank's parts of them."""
        return [values_of(each) for each in self._average], [values_of(each) for each in self._weights]

    def plain_weights(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._average, strict=True))

    def load(self, plain: Mapping[str, Tensor] | None, model: nn.Module) -> None:
        """Continue from a checkpoint whose weights the model has loaded.

        Without an average in this run the plain weights are used; without one in the checkpoint the average begins with
        its weights.
        """
        self.begin()
        if plain is None:
            return
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in plain:
                    weight.copy_(plain[name])


class ScheduleFreeAverage(WeightAverage):
    """The average x that an optimizer of the package schedulefree makes of its steps; the plain weights are y.

    Defazio et al. 2024, equations 3 to 5. The optimizer computes each from the other, with rounding: y is kept while x
    is in its place, so that training does not depend on how often it is validated and saved.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, decay=0.0)
        self._optimizer = optimizer
        self.enabled = True
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._names, self._weights = list(named), list(named.values())
        self._optimizer.train()

    def begin(self) -> None:
        """Do nothing: the optimizer begins its average with its first step."""

    def update(self, step: int) -> None:
        """Do nothing: the optimizer's step has done it."""

    @torch.no_grad()
    def swap(self) -> None:
        if self._average:
            self._optimizer.train()
            average, weights = self._values()
            torch._foreach_copy_(weights, average)
            self._average = []
        else:
            self._average = [weight.detach().clone() for weight in self._weights]
            self._optimizer.eval()
