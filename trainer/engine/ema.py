"""Exponential moving average of the weights, which is validated, tested and saved; training uses the plain weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.engine.ddp_model import values_of


class WeightAverage:
    """The average of a model's trained weights over the updates; with a decay of 0 there is none.

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

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after update ``step``, from 1, into the average."""
        if self.enabled:
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
