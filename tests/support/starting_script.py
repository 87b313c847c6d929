"""Script that starts its own ranks, in the ways of other projects: ``starting_script.py WAY STEPS [FAULT]``."""

import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
FOR_EVER = 1_000_000


def train(rank: int, port: int, steps: int, fault: str) -> None:
    world_size, host = WORLD, "127.0.0.1"
    if (nodes := int(os.environ.get("NNODES", "1"))) > 1:
        rank, world_size, port = (
            rank + WORLD * int(os.environ["NODE_RANK"]),
            WORLD * nodes,
            int(os.environ["MASTER_PORT"]),
        )
        host = os.environ["MASTER_ADDR"]
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size)
    work(rank, steps, fault)


def work(rank: int, steps: int, fault: str) -> None:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def save(*_: object) -> None:
        print(f"rank {rank} saved", flush=True)
        sys.exit(0)

    if steps == FOR_EVER:
        signal.signal(signal.SIGTERM, save)
    for step in range(steps):
        if rank == 1 and fault == "slow":
            time.sleep(0.05)
        if rank == 1 and step == 3:
            fail(fault)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if steps == FOR_EVER:
            time.sleep(0.02)
    print(f"rank {rank} of {dist.get_world_size()}: {float(model.module.weight.sum()):.9f}")
    dist.destroy_process_group()


def fail(fault: str) -> None:
    if fault == "raise":
        raise ValueError("no such label")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(7)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(way: str, steps: int, fault: str) -> None:
    port = free_port()
    if way == "spawn":
        mp.spawn(train, (port, steps, fault), nprocs=WORLD)
    elif way in ("fork", "processes"):
        context = mp.get_context("spawn" if way == "processes" else way)
        processes = [context.Process(target=train, args=(rank, port, steps, fault)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    elif way == "subprocess":
        command = [sys.executable, __file__, "rank", str(steps), fault]
        started = [subprocess.Popen([*command, str(rank), str(port)]) for rank in range(WORLD)]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a rank has failed")
    elif way == "first":  # the script's own process is rank 0, as with Lightning
        command = [sys.executable, __file__, "rank", str(steps), fault, "1", str(port)]
        other = subprocess.Popen(command)
        train(0, port, steps, fault)
        other.wait()
    elif way == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
        subprocess.run([*command, __file__, "elastic", str(steps), fault], check=True)
    elif way == "elastic":
        dist.init_process_group("gloo")
        work(dist.get_rank(), steps, fault)
    elif way == "rank":
        train(int(sys.argv[4]), int(sys.argv[5]), steps, fault)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
