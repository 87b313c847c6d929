"""One rule for the steps of a script that was started again, in states, reports, comparisons and exports."""

from __future__ import annotations

from typing import Any

import pytest

from gputrain_tui.history.export.extent import summary
from gputrain_tui.history.export.steps import RankExtent
from gputrain_tui.report.report_fields import RunFacts
from gputrain_tui.report.run_report import run_report
from gputrain_tui.state import RunState
from trainer.contract.record import RankState, Step, TrainingPlan


def plan(first_update: int) -> TrainingPlan:
    return TrainingPlan(time=1.0, world_size=1, updates_per_epoch=9, samples_per_epoch=9, first_update=first_update)


def joins() -> RankState:
    return RankState(time=1.0, rank=0, state="joining")


def step(number: int, steps: int = 1) -> Step:
    return Step(time=float(number), rank=0, step=number, epoch=1, steps=steps, samples=1, loss=1.0)


AGAIN = "in its last start; each start of the script counts from 1 and is an attempt of its own"
REPEATED = "in 2 attempts, which repeat steps"


@pytest.mark.parametrize(
    ("events", "anew", "told"),
    [
        ([step(1), step(2)], False, "2 steps of 1 rank, 1 to 2"),
        ([step(4, steps=4), step(3, steps=3)], True, f"7 steps of 1 rank, 1 to 3 {AGAIN}"),
        ([step(1), step(2), step(1)], True, f"3 steps of 1 rank, 1 to 1 {AGAIN}"),
        ([step(1), step(2), step(2), step(3)], False, f"4 steps of 1 rank, 1 to 3 {REPEATED}"),
        (
            [joins(), plan(0), step(1), step(2), joins(), plan(1), step(2)],
            False,
            f"3 steps of 1 rank, 1 to 2 {REPEATED}",
        ),
        (
            [joins(), plan(0), step(1), step(2), joins(), plan(0), step(1)],
            False,
            f"3 steps of 1 rank, 1 to 1 {REPEATED}",
        ),
    ],
)
def test_steps_that_begin_again_are_noticed_alike_by_report_and_export(
    events: list[Any], anew: bool, told: str
) -> None:
    state, extent = RunState(world_size=1), RankExtent(rank=0)
    for event in events:
        state.apply(event)
        list(extent.step(event)) if isinstance(event, Step) else extent.note(event)
    report = run_report(state, RunFacts(id="a", recipe="r", state="finished", run_dir="/r"))
    assert (state.counts_anew, report.counts_anew, summary([extent])) == (anew, anew, told)
