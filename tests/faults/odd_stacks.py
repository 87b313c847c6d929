"""A script whose ranks hang after 20 steps: one in each way in which a request for stacks may meet it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def hold_interpreter() -> None:
    library = ctypes.PyDLL(None)  # calls of it hold the interpreter's lock
    silent, _ = os.pipe()
    Path(os.environ["GPUTRAIN_RUN"], f"held{dist.get_rank()}").touch()
    # A read goes on after a signal; a sleep returns, and the lock changes hands.
    library.read(silent, ctypes.create_string_buffer(1), 1)


def own_handler(*_: object) -> None:
    print("the script's own handler ran", flush=True)


def hang(rank: int) -> None:
    if rank == 0:
        hold_interpreter()
    if rank == 1:
        signal.signal(signal.SIGQUIT, own_handler)
        time.sleep(4)  # the watching thread notices within three seconds
        hold_interpreter()
    if rank == 2:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT])
        hold_interpreter()
    if rank == 3:
        signal.signal(signal.SIGQUIT, own_handler)
        Path(os.environ["GPUTRAIN_RUN"], "held3").touch()
        time.sleep(600)


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        if step == 20:
            hang(dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()


main()
