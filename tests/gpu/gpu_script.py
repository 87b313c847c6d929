"""Script that knows nothing of gputrain and trains on a GPU in the way that its first argument names.

``ddp``, ``fsdp2``, ``own collectives`` (DDP's sums written out, and one whose result is awaited late), ``cuda graph``.
The second is the steps, the third a file for the weights. From the tenth step on a wait of the host for the GPU raises.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

BATCH, WIDTH, LAYERS = 64, 512, 8


def collective_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    seen = torch.zeros((), device="cuda")

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        counted = dist.all_reduce(seen, async_op=True)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if counted is not None:
            counted.wait()
        return loss.detach()

    return step


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a step whose forward and backward pass, and a collective, are replayed from a graph."""
    fixed = torch.zeros(BATCH, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(fixed).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parameter in model.parameters():
            parameter.grad.zero_()  # type: ignore[union-attr]
        loss = model(fixed).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    def step(batch: Tensor) -> Tensor:
        fixed.copy_(batch)
        graph.replay()
        optimizer.step()
        return loss.detach()

    return step


def main(way: str, steps: int, weights: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if way == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index])
    elif way == "fsdp2":
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_shard",))
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    maker = {"own collectives": collective_step, "cuda graph": graph_step}.get(way, plain_step)
    step = maker(model, optimizer)
    batch = torch.randn(BATCH, WIDTH, device=device)
    began = 0.0
    for number in range(steps):
        if number == 10:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            began = time.perf_counter()
        step(batch)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    print(f"ms a step: {1e3 * (time.perf_counter() - began) / (steps - 10):.4f}")
    values = [value.full_tensor() if isinstance(value, DTensor) else value for value in model.state_dict().values()]
    torch.save([value.cpu() for value in values], weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
