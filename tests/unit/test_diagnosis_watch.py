from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from manual_clock import ManualClock

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.lifecycle.diagnosis_watch import DUTY, INTERVAL_S, LiveDiagnosis
from gputrain_tui.state import RunState
from trainer.contract.record import Finding, RankState, RunDir, Step, encode_event


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


# --- clocks and defects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_clock_that_jumps_and_records_with_gaps_do_not_end_the_diagnosis(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    run_dir = RunDir(tmp_path)
    run_dir.events.mkdir()
    clock = ManualClock()
    watch = LiveDiagnosis(run_dir, now=clock, clock=clock, cost=ManualClock())
    reported = [0, 0]
    jump_s = [0.0, 0.0]
    found: list[Finding] = []
    for _ in range(40):
        for rank in (0, 1):
            if draw.random() < 0.15:
                jump_s[rank] = draw.choice((-3600.0, -5.0, 0.0, 5.0, 3600.0))
            if draw.random() < 0.1:
                reported[rank] += draw.randint(1, 3)  # lost events
            with run_dir.rank_events(rank).open("ab") as file:
                for _ in range(draw.randint(1, 4)):
                    steps = draw.choice((1, 1, 5, 17))
                    reported[rank] += steps
                    late_ms = 30.0 * rank
                    file.write(
                        encode_event(
                            Step(
                                time=1000.0 + reported[rank] * 0.05 + jump_s[rank],
                                rank=rank,
                                step=reported[rank],
                                epoch=1,
                                steps=steps,
                                samples=8 * steps,
                                loss=2.0,
                                step_ms=80.0,
                                data_ms=1.0,
                                forward_ms=15.0 + late_ms,
                                backward_ms=30.0,
                                optimizer_ms=2.0,
                                sync_exposed_ms=32.0 - late_ms,
                                sync_exposed_ms_each=[32.0 - late_ms] * steps if steps > 1 else None,
                            )
                        )
                    )
        lead = max(reported)
        reported = [lead, lead]
        clock.seconds += INTERVAL_S
        found += watch.check()
    watch.close()
    assert [finding.message for finding in found if finding.kind == "not_diagnosed"] == []


def test_the_events_of_one_file_keep_their_order_where_a_clock_is_set_back(run_dir: RunDir) -> None:
    run_dir.events.mkdir()
    times = {0: [10.0, 11.0, 5.0, 6.0, 12.0], 1: [10.5, 10.6, 11.5, 11.6, 11.7]}
    for rank, each in times.items():
        lines = [encode_event(RankState(time=moment, rank=rank, state="training")) for moment in each]
        run_dir.rank_events(rank).write_bytes(b"".join(lines))
    reader = RunReader(run_dir)
    events = reader.poll()
    reader.close()
    for rank, each in times.items():
        assert [event.time for event in events if isinstance(event, RankState) and event.rank == rank] == each
    assert [event.time for event in events][:3] == [10.0, 10.5, 10.6]


def test_a_check_with_a_defect_is_reported_once_and_the_others_go_on() -> None:
    """A step whose phases are text, which no record can hold, fails in the comparison of ranks."""
    state = RunState(world_size=2, history=HISTORY)
    diagnosis = Diagnosis()
    found: list[Finding] = []
    for number in range(1, 31):
        for rank in (0, 1):
            is_nan = number > 20 and rank == 1
            loss, marks = (None, ["loss"]) if is_nan else (2.0, [])
            event = Step(time=1000.0 + number, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=loss)
            state.apply(msgspec.structs.replace(event, step_ms=50.0, non_finite=marks))
        for view in state.ranks.values():
            view.steps[-1].forward_ms = "fast"  # type: ignore[assignment]
        found += diagnosis.update(state, 1000.0 + number)
    failed = [finding for finding in found if finding.kind == "not_diagnosed"]
    assert len(failed) == 1
    assert "is no longer checked: TypeError: " in failed[0].message
    assert any(finding.kind == "non_finite" for finding in found)
