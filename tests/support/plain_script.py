"""Plain DDP script that does not import gputrain."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    collate = lambda batch: torch.stack(batch)  # noqa: E731  (cannot be pickled: only forked workers get it)
    for batch in DataLoader(Points(), batch_size=4, num_workers=1, collate_fn=collate):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.environ['LOCAL_RANK']} {sys.argv[1:]}")
