"""Training script that uses ``watch``; started by torchrun, by ``mp.spawn`` or as one process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

if Path(__file__).with_name("trainer.py").exists():
    import trainer  # the script's own
    from gputrain_tui.scripts import watch
else:
    from trainer.watch import watch

STEPS = 12


class SlowLoader(DataLoader[Any]):
    """Data loader that is slow on rank 1."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(0.1 if dist.is_initialized() and dist.get_rank() == 1 else 0.0)
            yield batch


def train() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = SlowLoader(TensorDataset(torch.randn(STEPS * 4, 32)), batch_size=8)
    with watch(model, optimizer, checksum_every=5) as watched:
        for _ in range(2):
            assert "trainer" not in globals() or trainer.OWN  # another module of ours would have no such name
            for (batch,) in watched.batches(loader):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                watched.report(loss=loss, tokens=80)
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(batch)
            time.sleep(0.5)
            model.train()
        if "fail" in sys.argv:
            raise ValueError("no more data")


def spawned(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train()
    sys.stdout.flush()
    os._exit(0)  # leaving the group in order can hang in gloo's threads


if __name__ == "__main__":
    if "spawn" in sys.argv:
        mp.spawn(spawned, args=(sys.argv[-1],), nprocs=2)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
        train()
        sys.stdout.flush()
        os._exit(0)
    else:
        train()
