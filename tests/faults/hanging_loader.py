"""A script in which one of rank 1's loader workers hangs in the user's code."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 40:
            read_from_dead_server()
        return torch.ones(4)


def read_from_dead_server() -> None:
    silent, _ = os.pipe()
    Path(os.environ["GPUTRAIN_RUN"], "hangs").touch()
    os.read(silent, 1)


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Images(dist.get_rank()), num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


main()
