"""Fault that the environment orders for a script's model: one rank is held up, or fails, in its forward pass.

HELD_UP=1:160: rank 1 takes 30 ms longer in each forward pass in training from the 161st on. FAILS=1:5: it raises in the
6th. Without them nothing happens.
"""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

DELAY_S = 0.030


class FaultLayer(nn.Module):
    """Returns its input, after its rank's fault."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.held_up_after, self.fails_after = passes_before("HELD_UP"), passes_before("FAILS")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes > self.fails_after:
                raise ValueError("no more data")
            if self.passes > self.held_up_after:
                time.sleep(DELAY_S)
        return x


def passes_before(name: str) -> float:
    """Return the forward passes of this rank before the fault that an environment variable orders."""
    rank, _, passes = os.environ.get(name, "").partition(":")
    return float(passes) if rank == os.environ["RANK"] else float("inf")
