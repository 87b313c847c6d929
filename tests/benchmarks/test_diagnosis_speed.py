"""What a look of the diagnosis costs per rank: with many ranks it must not cost more than with few."""

from __future__ import annotations

import statistics
import time

import pytest

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.state import RunState
from trainer.contract.record import Step

pytestmark = pytest.mark.benchmark

MOST_MS = 60.0
"""Of a look at 1,024 ranks; three times what a quiet machine needs."""


def look_ms(ranks: int) -> float:
    """Return what a look costs after each step of a run with a slow rank, median, ms of processor time."""
    state, diagnosis, costs = RunState(world_size=ranks, history=HISTORY), Diagnosis(), []
    for number in range(1, 140):
        held = 30.0 if number > 100 else 0.0
        for rank in range(ranks):
            extra = held if rank == 3 else 0.0
            state.apply(
                Step(
                    time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=8, loss=2.0, grad_norm=1.0,
                    step_ms=45.0 + held, data_ms=1.0 + rank % 7 / 10, h2d_ms=0.5,
                    forward_ms=12.0 + number % 5 / 10 + extra, backward_ms=24.0, optimizer_ms=2.5,
                    sync_exposed_ms=3.0 + held - extra,
                    core_wait_ms={"forward": rank % 3 / 10},
                )
            )  # fmt: skip
        began = time.process_time()
        found = diagnosis.update(state, float(number))
        costs.append(time.process_time() - began)
        state.apply_all(found)
    assert [finding.rank for finding in state.past_findings] == [3]
    return 1e3 * statistics.median(costs[-32:])


def test_a_look_at_1024_ranks_costs_per_rank_what_one_at_64_costs() -> None:
    few, many = look_ms(64), look_ms(1024)
    ratio = (many / 1024) / (few / 64)
    print(f"\na look at 64 ranks {few:.1f} ms, at 1,024 ranks {many:.1f} ms: {ratio:.2f} per rank", end=" ")
    assert ratio <= 1.5
    assert many <= MOST_MS
