"""A user's script with steps of about two milliseconds, in which a rank is held up from some step on.

Arguments: where it is held up, the rank, the step from which on, steps in all.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.watch import watch

DELAY_S = 0.030


class Held(nn.Module):
    """Holds its rank up in its own forward pass, or its gradient's, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: Any) -> Any:
        time.sleep(self.forward_s)
        if self.backward_s and x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(self.backward_s))
        return x


class HeldSGD(torch.optim.SGD):
    """Holds its rank up in the optimizer's step."""

    pause_s = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.pause_s)
        return super().step(closure)


def main() -> None:
    where, late_rank, first, steps = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    late = dist.get_rank() == late_rank
    torch.manual_seed(1)
    held = Held()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), held, nn.Tanh(), nn.Linear(256, 256)))
    optimizer = HeldSGD(model.parameters(), lr=0.01)
    pause_s = 0.0

    def batches() -> Any:
        for _ in range(steps):
            time.sleep(pause_s if where == "data" else 0.0)
            yield torch.randn(192, 256)

    with watch(model, optimizer) as watched:
        for number, batch in enumerate(watched.batches(batches()), start=1):
            pause_s = DELAY_S if late and number >= first else 0.0
            optimizer.pause_s = pause_s if where == "optimizer" else 0.0
            held.forward_s = pause_s if where == "forward" else 0.0
            held.backward_s = pause_s if where == "backward" else 0.0
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    sys.stdout.flush()
    os._exit(0)  # leaving the group in order can hang in gloo's threads


if __name__ == "__main__":
    main()
