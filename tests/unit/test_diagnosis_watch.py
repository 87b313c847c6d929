from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from manual_clock import ManualClock

from gputrain_tui.lifecycle.diagnosis_watch import DUTY, INTERVAL_S, LiveDiagnosis
from trainer.contract.record import RunDir, Step, encode_event


def record(run_dir: RunDir, first: int, last: int, *, late_ms: float = 0.0) -> None:
    """Append steps of two ranks, the second of which is late in its forward pass."""
    run_dir.events.mkdir(exist_ok=True)
    for rank in (0, 1):
        extra = late_ms if rank == 1 else 0.0
        with run_dir.rank_events(rank).open("ab") as file:
            for number in range(first, last + 1):
                file.write(
                    encode_event(
                        Step(
                            time=1000.0 + number * 0.05,
                            rank=rank,
                            step=number,
                            epoch=1,
                            steps=1,
                            samples=8,
                            loss=2.0,
                            step_ms=50.0 + late_ms,
                            data_ms=1.0,
                            forward_ms=15.0 + extra,
                            backward_ms=30.0,
                            optimizer_ms=2.0,
                            sync_exposed_ms=2.0 + late_ms - extra,
                        )
                    )
                )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_growing_record_is_diagnosed(run_dir: RunDir) -> None:
    clock, cost = ManualClock(), ManualClock()
    watch = LiveDiagnosis(run_dir, now=clock, clock=clock, cost=cost)
    record(run_dir, 1, 60)
    clock.seconds += INTERVAL_S
    assert watch.check() == []
    record(run_dir, 61, 75, late_ms=30.0)
    assert watch.check() == []  # it is not due yet
    clock.seconds += INTERVAL_S
    assert [(finding.kind, finding.rank, finding.cause) for finding in watch.check()] == [("straggler", 1, "forward")]
    watch.close()


def pauses_after(run_dir: RunDir, costs_s: Sequence[float]) -> list[float]:
    """Look at a record so many times, and return the seconds until the next look after each."""
    clock = ManualClock()
    readings = [reading for cost_s in costs_s for reading in (0.0, cost_s)]
    watch = LiveDiagnosis(run_dir, now=clock, clock=clock, cost=lambda: readings.pop(0))
    found = []
    for _ in costs_s:
        clock.seconds += watch.due_in_s()
        watch.check()
        found.append(watch.due_in_s())
    watch.close()
    return found


def test_costly_diagnoses_become_rarer(run_dir: RunDir) -> None:
    assert pauses_after(run_dir, [0.6]) == [pytest.approx(0.6 / DUTY)]
    assert pauses_after(run_dir, [0.0] + 30 * [0.6])[-1] == pytest.approx(0.6 / DUTY, rel=0.1)


def test_one_costly_diagnosis_does_not_delay_the_next_for_long(run_dir: RunDir) -> None:
    usual_s = 0.9 * DUTY * INTERVAL_S
    pauses = pauses_after(run_dir, [usual_s, usual_s, 20 * usual_s, usual_s, usual_s, usual_s])
    assert pauses[:2] == pytest.approx([INTERVAL_S] * 2)
    assert pauses[2] < 4 * INTERVAL_S
    assert pauses[-1] < 1.5 * INTERVAL_S


def test_a_long_record_is_read_whole_before_it_is_diagnosed(run_dir: RunDir) -> None:
    """A supervisor that takes over reads the whole history; what was true in the middle of it is no news."""
    record(run_dir, 1, 60)
    record(run_dir, 61, 400, late_ms=30.0)
    record(run_dir, 401, 500)
    clock, cost = ManualClock(), ManualClock()
    watch = LiveDiagnosis(run_dir, now=clock, clock=clock, cost=cost)
    clock.seconds += INTERVAL_S
    found = watch.check()
    while watch.due_in_s() == 0.0:
        found += watch.check()
    assert found == []
    watch.close()


def test_the_step_time_is_that_of_the_slowest_rank(run_dir: RunDir) -> None:
    clock, cost = ManualClock(), ManualClock()
    watch = LiveDiagnosis(run_dir, now=clock, clock=clock, cost=cost)
    assert watch.step_s == 0.0
    record(run_dir, 1, 3, late_ms=29950.0)
    clock.seconds += INTERVAL_S
    watch.check()
    assert watch.step_s == 30.0
    record(run_dir, 4, 4)
    clock.seconds += INTERVAL_S
    watch.check()
    assert watch.step_s == 0.05
    watch.close()
