"""Agreement of the reported exposed synchronisation with an independently timed all-reduce."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_group import Gang
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.contract.record import EventWriter, Step, decode_events
from trainer.telemetry.step_meter import StepMeter

pytestmark = pytest.mark.benchmark

CPU = torch.device("cpu")
ROUNDS = 300
WIDTH = 1448  # 8 MiB of gradient, in one bucket: nothing to overlap with, so that all of it is exposed


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


def _measure(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """Return the reported exposed milliseconds, and those of a bare all-reduce after a barrier, alternately."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False), gradient_as_bucket_view=True)
    path = Path(folder) / f"{rank}.ndjson"
    writer = EventWriter(path, rank=rank)
    moment = itertools.count(1000)
    meter = StepMeter(model, device=CPU, writer=writer, rank=rank, now=lambda: float(next(moment)))
    data = torch.randn(4, WIDTH)
    same_bytes = torch.randn(WIDTH * WIDTH)
    bare = []
    for step in range(1, ROUNDS + 1):
        loss = model(data).square().mean()
        dist.barrier()  # balanced: the ranks enter backward together
        meter.start()
        loss.backward()
        meter.lap("backward")
        meter.end(step=step, epoch=1, samples=4)
        model.zero_grad()
        same_bytes.mul_(0.5)  # brings it into the cache, as the gradient is
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(same_bytes)
        bare.append((time.perf_counter() - begin) * 1e3)
    meter.close()
    writer.close()
    steps = [event for event in decode_events(path.read_bytes()) if isinstance(event, Step)]
    return [step.sync_exposed_ms for step in steps if step.sync_exposed_ms is not None], bare


def test_exposed_synchronisation_agrees_with_a_bare_all_reduce_within_15_percent(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(_measure, str(tmp_path))
    # The last rank to arrive waits for the transfer only; the wait of the other includes the difference of arrivals.
    reported = statistics.median(min(pair) for pair in zip(*(exposed for exposed, _ in results), strict=True))
    bare = statistics.median(min(pair) for pair in zip(*(times for _, times in results), strict=True))
    print(f"\nexposed {reported:.2f} ms, bare all-reduce {bare:.2f} ms, ratio {reported / bare:.3f}")
    assert 0.85 <= reported / bare <= 1.15
