"""Record of many fast steps, by the trainer's writer: events cover several steps, grouped differently on each rank."""

from __future__ import annotations

from pathlib import Path

import synthetic

from gputrain_tui.history.run_folders import Run
from trainer.contract.record import EventWriter, Step
from trainer.telemetry.step_events import merge

EVENTS_PER_FLUSH = 5_000


def loss_of(rank: int, number: int) -> float:
    """Return a loss that differs from step to step and has an exact decimal form of seven digits."""
    return (number * 7 + rank) % 4096 / 8


def long_run(root: Path, *, steps: int, ranks: int = 2) -> Run:
    run = synthetic.run(root, steps=0, ranks_per_node=ranks, status="finished")
    for rank in range(ranks):
        writer = EventWriter(run.dir.rank_events(rank), rank=rank)
        done = events = 0
        while done < steps:
            width = min(1 + (events * 5 + rank) % 13, steps - done)
            writer.write(merge([single(rank, number) for number in range(done + 1, done + width + 1)]))
            done, events = done + width, events + 1
            if events % EVENTS_PER_FLUSH == 0:
                assert writer.flush(60)
        writer.close(60)
        assert writer.lost == 0
    return run


def single(rank: int, number: int) -> Step:
    return Step(
        time=synthetic.BEGIN + 4 + number * 0.02, rank=rank, step=number, epoch=1, steps=1, samples=16,
        loss=loss_of(rank, number), lr=0.001, grad_norm=0.9, step_ms=18 + number % 3, data_ms=1 + number % 2,
        forward_ms=5.0, backward_ms=7.0, optimizer_ms=1.0, sync_ms=3.0, sync_exposed_ms=number % 5 / 4,
        sync_bytes=4_200_000, sync_buckets=2, core_wait_ms={"forward": 0.5},
        bucket_ms=[1.5, 1.25] if number % 32 == 0 else None,
    )  # fmt: skip
