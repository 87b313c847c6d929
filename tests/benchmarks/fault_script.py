"""Endless small steps of DDP, as written for torchrun; the rank of each host names its process in a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = 0.02
"""Of a step, which would take all cores."""


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(PAUSE_S)
        step += 1
        if step == 20:
            Path(sys.argv[1], f"pid.{os.uname().nodename}").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
