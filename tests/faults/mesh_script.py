"""Script of four ranks in a mesh of 2 x 2: layers split over ``tp``, gradients averaged over ``dp``.

Rank 3 is 200 ms late in each backward pass for some steps, and later calls another collective than the other rank of
its ``dp``.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

LATE_S = 0.2
SLOW_RANK = 3


def main(late_from: int, even_from: int, odd_at: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    torch.manual_seed(rank % 2)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0

    def hold_up(gradient: Tensor) -> Tensor:
        if rank == SLOW_RANK and late_from <= step < even_from:
            time.sleep(LATE_S)
        return gradient

    while step <= odd_at:
        step += 1
        time.sleep(0.03)
        partial = model(torch.randn(16, 32))
        partial.register_hook(hold_up)
        others = partial.detach().clone()
        dist.all_reduce(others, group=tp)
        loss = (partial + others - partial.detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(torch.zeros(1), group=tp)
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            if rank == SLOW_RANK and step == odd_at:
                dist.all_gather([torch.empty_like(gradient) for _ in range(2)], gradient, group=dp)
            else:
                dist.all_reduce(gradient, group=dp)
            gradient /= 2
        optimizer.step()


main(*map(int, sys.argv[1:4]))
