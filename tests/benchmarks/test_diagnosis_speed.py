"""CPU time of a diagnosis update per rank, which must not grow with the number of ranks."""

from __future__ import annotations

import statistics
import time

import pytest

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.state import RunState
from trainer.contract.record import Step, decode_events, encode_event

pytestmark = pytest.mark.benchmark

MOST_OF_DECODING = 100.0
"""Maximum time of an update with 1,024 ranks over that of decoding one event of each: measured 43."""


def diagnose_and_decode_ms(ranks: int) -> tuple[float, float]:
    """Return the CPU time of a diagnosis update after each step of a run with a slow rank, and of decoding the events.

    Both are medians, in ms per step.
    """
    state, diagnosis, costs = RunState(world_size=ranks, history=HISTORY), Diagnosis(), []
    for number in range(1, 140):
        held = 30.0 if number > 100 else 0.0
        events = []
        for rank in range(ranks):
            extra = held if rank == 3 else 0.0
            events.append(
                Step(
                    time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=8, loss=2.0, grad_norm=1.0,
                    step_ms=45.0 + held, data_ms=1.0 + rank % 7 / 10, h2d_ms=0.5,
                    forward_ms=12.0 + number % 5 / 10 + extra, backward_ms=24.0, optimizer_ms=2.5,
                    sync_exposed_ms=3.0 + held - extra,
                    core_wait_ms={"forward": rank % 3 / 10},
                )
            )  # fmt: skip
        state.apply_all(events)
        began = time.process_time()
        found = diagnosis.update(state, float(number))
        costs.append(time.process_time() - began)
        state.apply_all(found)
    assert [finding.rank for finding in state.past_findings] == [3]
    line, decoding = b"".join(map(encode_event, events)), []
    for _ in range(32):
        began = time.process_time()
        assert len(list(decode_events(line))) == ranks
        decoding.append(time.process_time() - began)
    return 1e3 * statistics.median(costs[-32:]), 1e3 * statistics.median(decoding)


def test_a_diagnosis_of_1024_ranks_costs_per_rank_the_same_as_of_64() -> None:
    (few, _), (many, decoding) = diagnose_and_decode_ms(64), diagnose_and_decode_ms(1024)
    ratio = (many / 1024) / (few / 64)
    print(f"\na look at 64 ranks {few:.1f} ms, at 1,024 ranks {many:.1f} ms: {ratio:.2f} per rank", end=" ")
    print(f"and {many / decoding:.1f} times decoding them ({decoding:.2f} ms)", end=" ")
    assert ratio <= 1.5
    assert many <= MOST_OF_DECODING * decoding
