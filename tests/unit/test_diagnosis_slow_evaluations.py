"""A rank for which the others wait in each evaluation of a script."""

from __future__ import annotations

import pytest

from gputrain_tui.diagnosis import HISTORY, Diagnosis, thresholds as limit
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import finding_summary
from trainer.contract.record import Finding, Step

STEPS = 20
"""Steps from one evaluation to the next."""


def diagnosed(own_s: list[list[float]], *, period_s: float = 20.0, ranks_that_record: int = 3) -> list[Finding]:
    """Return the findings of a run of three ranks; ``own_s``: of each evaluation, the work of each rank in it."""
    state, diagnosis, findings = RunState(world_size=3, history=HISTORY), Diagnosis(), []
    step_s = period_s / STEPS
    for number in range(1, STEPS * len(own_s) + 1):
        evaluation = own_s[number // STEPS - 1] if number % STEPS == 0 else None
        for rank in state.ranks:
            event = Step(
                time=number * step_s, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=1.0, step_ms=10.0,
                data_ms=1.0, forward_ms=4.0, backward_ms=4.0, optimizer_ms=1.0, other_ms=0.0, sync_exposed_ms=0.1,
            )  # fmt: skip
            if evaluation is not None and rank < ranks_that_record:
                event.evaluation_ms = 1e3 * evaluation[rank]
            state.apply(event)
            findings += diagnosis.update(state, number * step_s)
    return findings


def test_a_rank_that_is_late_in_each_evaluation_is_named() -> None:
    late = [0.1, 2.1, 0.1]
    (found,) = diagnosed([late] * limit.EVALUATIONS)
    assert (found.kind, found.rank, found.severity, found.state) == ("slow_evaluation", 1, "warning", "raised")
    assert found.message == (
        "rank 1 takes 2.0 s longer than the others in each evaluation, and they wait for it: 10 % of the time from one "
        "evaluation to the next"
    )
    assert finding_summary(found) == "rank 1 slow in evaluations"
    assert found.step == STEPS * limit.EVALUATIONS
    assert found.step == STEPS * 3, "not at once, and not after half of a run"
    raised, cleared = diagnosed([late] * 3 + [[0.1, 0.1, 0.1]] * 3)
    assert (raised.state, cleared.state) == ("raised", "cleared")


@pytest.mark.parametrize(
    ("late_s", "names"),
    [(0.6, False), (1.5, True)],
)
def test_a_late_evaluation_counts_by_its_share_of_the_time_between_two(late_s: float, names: bool) -> None:
    assert bool(diagnosed([[0.1, 0.1 + late_s, 0.1]] * 4)) is names


@pytest.mark.parametrize(
    "own_s",
    [
        [[2.1, 0.1, 0.1], [0.1, 2.1, 0.1], [0.1, 0.1, 2.1]] * 2,
        [[0.1, 2.1, 0.1], [0.1, 0.1, 0.1]] * 3,
        [[5.0, 8.0, 5.0]] * 4,
        [[8.0, 8.0, 8.0]] * 4,
    ],
    ids=["in turns", "every other time", "less than twice as long", "all alike"],
)
def test_evaluations_in_which_no_rank_is_late_each_time_are_no_finding(own_s: list[list[float]]) -> None:
    assert diagnosed(own_s) == []


def test_an_evaluation_that_not_all_ranks_make_compares_none() -> None:
    assert diagnosed([[0.1, 2.1, 0.1]] * 4, ranks_that_record=2) == []
