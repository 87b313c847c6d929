"""Scales the loss in fp16, and knows which steps it left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    """torch's ``GradScaler``, which also answers whether a step was taken; in another precision it does nothing.

    Args:
        device: where the model is.
        enabled: whether the precision is fp16.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.value = self._scaler.get_scale()
        """The scale of the next loss; 1 where nothing is scaled."""
        self.left_out = 0
        """Steps in a row that were not taken."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss [] times the scale."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and remember whether one of them is not finite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step unless a gradient is not finite, and adjust the scale; return whether the step was taken.

        In fp16 this is a CPU-GPU sync point, as ``GradScaler.step`` is for every optimizer that is not fused.
        """
        self._scaler.step(optimizer)
        if not self.enabled:
            return True
        self._scaler.update()
        before, self.value = self.value, self._scaler.get_scale()
        taken = self.value >= before  # only a gradient that is not finite lowers it
        self.left_out = 0 if taken else self.left_out + 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and what adjusts it; empty where nothing is scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved scale; one of a training in another precision, which has none, begins afresh."""
        if state and self.enabled:
            self._scaler.load_state_dict(dict(state))
            self.value = self._scaler.get_scale()
