"""An exponential moving average of the weights: what is validated, tested and saved, while the plain ones go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of a model's trained weights over the updates; with a decay of 0 there is none.

    After each update it becomes ``decay`` of itself and ``1 - decay`` of the weights; it begins with the first ones.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad and decay}
        self._names = list(named)
        self._weights: list[Tensor] = list(named.values())
        self._average = [weight.detach().clone() for weight in self._weights]
        self._decay = decay
        self.enabled = decay > 0

    def begin(self) -> None:
        """Begin anew with the weights as they are."""
        for average, weight in zip(self._average, self._weights, strict=True):
            average.copy_(weight.detach())

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update."""
        if self.enabled:
            torch._foreach_lerp_(self._average, self._weights, 1.0 - self._decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the contents of the weights and the average, in place: whoever holds the weights sees the other."""
        if self.enabled:
            before = [weight.clone() for weight in self._weights]
            torch._foreach_copy_(self._weights, self._average)
            torch._foreach_copy_(self._average, before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average for as long as this lasts."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def plain_weights(self) -> dict[str, Tensor]:
        """Return, while the average is in place, the weights that training goes on with."""
        return dict(zip(self._names, self._average, strict=True))

    def load(self, plain: Mapping[str, Tensor] | None, model: nn.Module) -> None:
        """Go on from a checkpoint whose model has been loaded; ``plain`` are the weights beside it, where it had both.

        Without an average here the plain weights go on; without one there, the average begins with the weights.
        """
        self.begin()
        if plain is None:
            return
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in plain:
                    weight.copy_(plain[name])
