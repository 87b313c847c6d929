from __future__ import annotations

import pytest

from trainer.contract.outcome import answer_s
from trainer.engine.end_conditions import StepTimes


@pytest.mark.parametrize(
    ("times_s", "reported"),
    [
        ([0.01] * 9, []),
        ([11.0, 11.0, 11.5, 10.8], [11.0]),
        ([60.0, 0.1, 0.1, 0.1], [60.0, 0.3]),
        ([2.0, 2.0, 4.0, 2.0, 2.0], [2.0, 4.0, 2.0]),
    ],
    ids=["short", "long", "the first compiles", "one is longer"],
)
def test_the_longer_of_the_last_two_steps_is_reported_where_it_has_changed(
    times_s: list[float], reported: list[float]
) -> None:
    clock = [100.0]
    reports: list[float] = []
    times = StepTimes(reports.append, now=lambda: clock[0])
    for seconds in times_s:
        clock[0] += seconds
        times.step_done()
    assert reports == pytest.approx(reported)


@pytest.mark.parametrize(("grace_s", "step_s", "seconds"), [(10.0, 0.3, 10.0), (10.0, 11.0, 33.0), (0.0, 2.0, 6.0)])
def test_ranks_may_take_three_steps_to_answer_and_the_grace_at_least(
    grace_s: float, step_s: float, seconds: float
) -> None:
    assert answer_s(grace_s, step_s) == seconds
