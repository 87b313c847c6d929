"""While no step comes, measurements of steps are hidden, and the time without one is shown."""

from __future__ import annotations

import pytest

from gputrain_tui.headless.progress import paint, plain_line, progress_line
from gputrain_tui.state import RunState
from gputrain_tui.state.standstill import Standstill, StepWatch
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import Doing, Finding, NodeSample, RankState, RunEnded, Step, TrainingPlan


def trained(step_s: float, *, steps: int = 20, state: str = "training") -> RunState:
    run = RunState(world_size=2, max_updates=100)
    run.apply(TrainingPlan(time=0.0, world_size=2, updates_per_epoch=50, samples_per_epoch=800, max_updates=100))
    for number in range(1, steps + 1):
        for rank in (0, 1):
            run.apply(Step(time=number * step_s, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=2.0,
                           step_ms=1e3 * step_s, forward_ms=500 * step_s, sync_exposed_ms=1.0))  # fmt: skip
    for rank in (0, 1):
        run.apply(RankState(time=steps * step_s, rank=rank, state=state))  # type: ignore[arg-type]
    return run


def watched(state: RunState, silent_s: float, *, clock_ahead_s: float = 0.0, live: bool = True) -> Standstill | None:
    watch = StepWatch()
    at = state.step_time + clock_ahead_s
    watch.note(state, at, live=live)
    return watch.standstill(state, at + silent_s)


@pytest.mark.parametrize(
    ("step_s", "silent_s", "is_reported", "is_long"),
    [
        (0.1, 1.9, False, False),
        (0.1, 2.1, True, True),
        (1.0, 2.5, False, False),
        (1.0, 3.5, True, False),
        (1.0, 10.5, True, True),
        (30.0, 60.0, False, False),
        (30.0, 310.0, True, True),
    ],
)
def test_the_time_is_shown_after_three_missed_steps_and_rates_go_after_ten(
    step_s: float, silent_s: float, is_reported: bool, is_long: bool
) -> None:
    still = watched(trained(step_s), silent_s)
    assert (still is not None) == is_reported
    assert (still is not None and still.is_long) == is_long


def test_a_host_whose_clock_is_behind_does_not_stand_still() -> None:
    assert watched(trained(0.1), 1.0, clock_ahead_s=3600.0) is None


def test_a_run_whose_clocks_are_set_back_does_not_stand_still_while_it_makes_steps() -> None:
    state, watch = trained(0.1), StepWatch()
    watch.note(state, 2.0)
    for rank in (0, 1):
        state.apply(Step(time=-18_000.0, rank=rank, step=21, epoch=1, steps=1, samples=8, loss=2.0, step_ms=100.0))
    watch.note(state, 40.0)
    assert watch.standstill(state, 41.0) is None
    still = watch.standstill(state, 45.0)
    assert still is not None
    assert still.text == "no step for 5 s"


def test_of_a_record_of_the_past_its_own_times_count() -> None:
    still = watched(trained(0.1), 0.0, clock_ahead_s=38.0, live=False)
    assert still is not None
    assert still.text == "no step for 38 s"


@pytest.mark.parametrize(
    ("state", "text"),
    [("training", "no step for 5 s"), ("validating", "validating for 5 s"), ("saving", "saving for 5 s")],
)
def test_a_standstill_names_the_activity_in_place_of_a_step(state: str, text: str) -> None:
    still = watched(trained(0.1, state=state), 5.0)
    assert still is not None
    assert still.text == text


def test_a_standstill_names_the_compiler_and_a_record_that_has_stopped_in_place_of_a_step() -> None:
    state = trained(0.1)
    state.apply(Doing(time=3.0, rank=0, step=21, part="compile", parts_done=1, waited_ms=5e3))
    still = watched(state, 61.0)
    assert still is not None
    assert still.text == "compiling for 1:01"
    state.apply(NodeSample(time=3.0, node=0, host="here", record_free_bytes=0))
    still = watched(state, 61.0)
    assert still is not None
    assert still.text == "nothing recorded for 1:01"


def test_an_attempt_after_the_first_one_is_starting_until_its_first_step() -> None:
    state, watch = trained(0.1), StepWatch()
    watch.note(state, 2.0)
    watch.note(state, 40.0)
    still = watch.standstill(state, 40.0)
    assert still is not None
    assert still.text == "no step for 38 s"
    state.apply(Finding(time=40.0, kind=RESTARTED, message="attempt 1 ended; attempt 2 begins"))
    watch.note(state, 40.0)
    for rank in (0, 1):
        state.apply(RankState(time=45.0 + rank, rank=rank, state="spawned", pid=9))
        watch.note(state, 45.0 + rank)
    still = watch.standstill(state, 47.0)
    assert still is not None
    assert (still.text, still.is_long) == ("starting again for 7 s", True), "rates are of the attempt before"
    line = paint(progress_line(state, 80, now=0.0, standstill=still), colour=False)
    assert "starting again for 7 s" in line
    assert "/s" not in line
    for rank in (0, 1):
        state.apply(Step(time=48.0, rank=rank, step=15, epoch=1, steps=1, samples=8, loss=2.0, step_ms=100.0))
    watch.note(state, 48.0)
    assert watch.standstill(state, 49.0) is None


def test_a_run_that_has_ended_or_has_no_step_yet_does_not_stand_still() -> None:
    over = trained(0.1)
    over.apply(RunEnded(time=3.0, status="finished", exit_code=0))
    assert watched(over, 100.0) is None
    assert watched(trained(0.1, state="finished"), 100.0) is None
    assert watched(RunState(world_size=2), 100.0) is None


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_progress_line_has_the_time_without_a_step_in_place_of_rate_and_time_left(width: int) -> None:
    state = trained(0.1)
    line = paint(progress_line(state, width, now=0.0), colour=False)
    assert "eta" in line or width < 80
    still = watched(state, 38.0)
    line = paint(progress_line(state, width, now=0.0, standstill=still), colour=False)
    assert "no step for 38 s" in line
    assert "eta" not in line
    assert "/s" not in line
    assert "no step for 38 s" in plain_line(state, now=0.0, standstill=still)
