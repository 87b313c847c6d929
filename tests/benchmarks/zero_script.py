"""Training with DDP and ``ZeroRedundancyOptimizer`` for so many steps, as in PyTorch's recipe for it."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]))
    loss_fn = nn.MSELoss()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    torch.manual_seed(dist.get_rank())
    for step in range(1, int(sys.argv[1]) + 1):
        outputs = model(torch.randn(20, 128))
        loss = loss_fn(outputs, torch.randn(20, 128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
