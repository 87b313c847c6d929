"""Cost of recording a script's collectives on CPU ranks, as a ratio of steps per second.

Blocks of steps of one measured training, alternately with its collectives followed and not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cores import stolen_s
from rank_group import Gang
from test_record_overhead import LEAST_PAIRS, PRECISION, STOLEN, interval
from torch import nn

from trainer.contract.record import Step, decode_events
from trainer.telemetry import instrument

pytestmark = pytest.mark.benchmark

BLOCK_S = 0.3
MAX_S = 90.0
"""Time after which the measurement ends at any precision."""
LAYERS = 24
WIDTH = 48

Train = Callable[[int], None]
"""Trains a step with a batch size."""


@pytest.fixture
def gang() -> Iterator[Gang]:
    gang = Gang(2, timeout_s=4 * MAX_S)
    yield gang
    gang.close()


def _net(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def _stepping(model: nn.Module, reduce: Callable[[], None]) -> Train:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batch: int) -> None:
        loss = model(torch.ones(batch, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        reduce()
        optimizer.step()

    return train


def _own_collectives() -> Train:
    model = _net(4)

    def reduce() -> None:
        works: list[Any] = [
            dist.all_reduce(parameter.grad, async_op=True)
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        for work in works:
            work.wait()

    return _stepping(model, reduce)


def _sharded() -> Train:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _net(LAYERS)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepping(model, lambda: None)


def _compare(
    rank: int, world_size: int, folder: str, make: Callable[[], Train], target_ms: float
) -> tuple[float, list[float], int]:
    """Return the milliseconds per step, per pair the time without over that with collectives, and pairs left out."""
    instrument.install(Path(folder, f"{rank}.ndjson"), rank)
    recording = instrument._recording
    assert recording is not None
    train, batch = make(), 16

    def advance(steps: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            train(batch)
        return (time.perf_counter() - begin) / steps

    agreed = torch.tensor(0.0)
    while True:
        agreed.fill_(statistics.quantiles([advance(5) for _ in range(12)], n=4)[0] * 1e3)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if agreed >= target_ms:
            break
        batch = int(batch * min(2.0, max(1.1, target_ms / float(agreed))))
    steps = max(1, round(BLOCK_S * 1e3 / float(agreed)))  # FSDP2's steps on CPU ranks are longer than asked
    ratios: list[float] = []
    left_out = 0
    over, end = torch.tensor(False), time.monotonic() + MAX_S
    while not over:
        before_s, times = stolen_s(), {}
        for followed in (False, True) if len(ratios) % 2 else (True, False):
            recording.collectives.on = followed
            times[followed] = advance(steps)
        lost = torch.tensor(stolen_s() - before_s > STOLEN * world_size * steps * sum(times.values()))
        dist.broadcast(lost, src=0)
        if lost:
            left_out += 1
        else:
            ratios.append(times[False] / times[True])
        low, high = interval(ratios) if len(ratios) >= LEAST_PAIRS else (0.0, 1.0)
        over.fill_((high - low) / 2 <= PRECISION or time.monotonic() > end)
        dist.broadcast(over, src=0)
    recording.collectives.on = True
    instrument.finish()
    events = [each for each in decode_events(Path(folder, f"{rank}.ndjson").read_bytes()) if isinstance(each, Step)]
    assert any(event.groups for event in events), "nothing was measured"
    return float(agreed), ratios, left_out


@pytest.mark.parametrize(
    ("make", "target_ms", "least"),
    [(_own_collectives, 20.0, 0.99), (_own_collectives, 3.0, 0.95), (_sharded, 20.0, 0.97)],
)
def test_recording_collectives_keeps_its_share_of_the_speed(
    gang: Gang, tmp_path: Path, make: Callable[[], Train], target_ms: float, least: float
) -> None:
    step_ms, ratios, left_out = gang.run(_compare, str(tmp_path), make, target_ms)[0]
    if len(ratios) < LEAST_PAIRS:
        pytest.skip(f"the host took the machine in {left_out} of {left_out + len(ratios)} pairs")
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    print(
        f"\nstep {step_ms:.2f} ms: {ratio:.4f} of the steps/s without recording collectives "
        f"(95 % {low:.4f} to {high:.4f}, {len(ratios)} pairs, {left_out} left out)"
    )
    assert ratio >= least
