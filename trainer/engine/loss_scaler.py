"""Loss scaling in fp16, and the number of steps left out because a gradient overflowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    """Wrapper of torch's ``GradScaler`` whose ``step`` returns whether it was taken; passes through if not enabled."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.value = self._scaler.get_scale()
        self.left_out = 0

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
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
        """Empty in another precision than fp16."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the initial scale if the state, of another precision, is empty."""
        if state and self.enabled:
            self._scaler.load_state_dict(dict(state))
            self.value = self._scaler.get_scale()
