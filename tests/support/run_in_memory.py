"""Run in memory that widgets can draw, without files and processes."""

from __future__ import annotations

import math
import random

from gputrain_tui.history.series import Series
from gputrain_tui.state import RunState
from trainer.contract.record import AnyEvent, Finding, GpuSample, NodeSample, RankState, Step


class RunInMemory:
    """Run with the interface of the console's ``LiveRun``."""

    standstill = None
    over = False
    caught_up = True
    end_text = ""

    def __init__(self, world_size: int) -> None:
        self.state = RunState(world_size=world_size)
        self.series = Series(world_size)

    @property
    def version(self) -> int:
        return self.state.version

    def apply(self, event: AnyEvent) -> None:
        self.state.apply(event)
        if isinstance(event, Step):
            self.series.apply(event)


def run_in_memory(world_size: int = 16, steps: int = 200, *, per_node: int = 8, seed: int = 1) -> RunInMemory:
    """Return a run with a falling loss, in which one rank is slow in the second half and reported as a straggler."""
    noise = random.Random(seed)
    run = RunInMemory(world_size)
    slow = world_size // 3
    for rank in range(world_size):
        run.apply(
            RankState(
                time=0.0, rank=rank, state="training", node=rank // per_node, host=f"node{rank // per_node:03}",
                device=f"cuda:{rank % per_node} GPU-{rank}",
            )
        )  # fmt: skip
    for first in range(0, world_size, per_node):
        gpus = [
            GpuSample(
                index=rank % per_node, uuid=f"GPU-{rank}", rank=rank, utilization_percent=90.0 + rank % 8,
                memory_used_bytes=(57 << 30) + (rank % 9 << 28), memory_total_bytes=80 << 30,
            )
            for rank in range(first, min(first + per_node, world_size))
        ]  # fmt: skip
        run.apply(NodeSample(time=0.0, node=first // per_node, host=f"node{first // per_node:03}", gpus=gpus))
    for number in range(1, steps + 1):
        loss = 1.5 + 9 * math.exp(-6 * number / steps)
        work = [190 + noise.gauss(0, 3) + (60 if r == slow and 2 * number > steps else 0) for r in range(world_size)]
        for rank in range(world_size):
            wait = 8 + max(work) - work[rank]
            run.apply(
                Step(
                    time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=32,
                    loss=loss + noise.gauss(0, 0.1), grad_norm=0.8, local_grad_norm=1.0 + rank / 100,
                    step_ms=work[rank] + wait + 12, data_ms=6.0, forward_ms=work[rank] / 3,
                    backward_ms=work[rank] * 2 / 3, optimizer_ms=6.0, sync_exposed_ms=wait,
                )
            )  # fmt: skip
    run.apply(Finding(time=float(steps), kind="straggler", rank=slow))
    return run
