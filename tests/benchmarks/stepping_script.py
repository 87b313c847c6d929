"""DDP script that trains on request: each line of its input, "BATCH STEPS METRICS", is one request.

After each step it gives so many metrics to the client of an experiment tracker, the module ``mlflow``. An answer is the
seconds of a step, and the CPU seconds that its metrics and the other threads of Python took.

It does not depend on its launcher. Its ranks read and answer through named pipes in the folder given as argument.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH = 128


class RepeatedBatch(Dataset):  # type: ignore[type-arg]
    """Dataset that repeats one batch."""

    def __init__(self, batch: int, steps: int) -> None:
        self.batch = torch.randn(batch, WIDTH)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


def stay_on_a_core(rank: int) -> None:
    core = sorted(os.sched_getaffinity(0))[rank]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def other_threads_s() -> float:
    """Return the CPU seconds that the threads of Python but this one have taken, such as the writer of a record."""
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.current_thread()]
    took = (Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0] for thread in others)
    return sum(map(int, took)) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stay_on_a_core(rank)
    with (
        Path(sys.argv[1], f"{rank}.request").open() as requests,
        Path(sys.argv[1], f"{rank}.answer").open("w") as answer,
    ):
        for line in requests:
            batch, steps, metrics = map(int, line.split())
            if metrics:
                import mlflow  # type: ignore[import-not-found]
            dist.barrier()
            began, others_s, metrics_s = time.perf_counter(), other_threads_s(), 0.0
            for points in DataLoader(RepeatedBatch(batch, steps), batch_size=None):
                optimizer.zero_grad()
                loss = model(points).square().mean()
                loss.backward()
                optimizer.step()
                if metrics:
                    at = time.thread_time()
                    mlflow.log_metrics({f"metric {number}": loss for number in range(metrics)})
                    metrics_s += time.thread_time() - at
            took = (time.perf_counter() - began, metrics_s, other_threads_s() - others_s)
            print(*(seconds / steps for seconds in took), file=answer, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
