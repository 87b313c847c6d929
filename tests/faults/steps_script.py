"""A user's script of many short steps, which waits at some of them for a file: ``STEPS (BEFORE FILE)...``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps = int(sys.argv[1])
    gates = {int(before): Path(gate) for before, gate in zip(sys.argv[2::2], sys.argv[3::2], strict=True)}
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        if (gate := gates.get(step)) is not None:
            gate.with_suffix(f".{dist.get_rank()}").touch()
            while not gate.exists():
                time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
