from __future__ import annotations

from math import nan
from typing import Any

import pytest

from gputrain_tui.history.run_columns import best_cell, run_filter, sorted_runs
from gputrain_tui.state.best_validation import BestValidation, RecordedValidations
from trainer.contract.record import TrainingPlan, Validation


def plan(**changes: Any) -> TrainingPlan:
    return TrainingPlan(time=1.0, world_size=1, updates_per_epoch=10, samples_per_epoch=10, **changes)


def valid(step: int, loss: float, near: float = 0.0, **changes: Any) -> Validation:
    fields = {"split": "valid", "metrics": {"near": near}, **changes}
    return Validation(time=2.0, step=step, epoch=1, loss=loss, **fields)


BY_NEAR = {"best_metric": "near", "best_is_highest": True}


@pytest.mark.parametrize(
    ("events", "best"),
    [
        ([plan()], None),
        ([valid(1, 3.0), valid(2, 2.0), valid(3, 2.5)], (2.0, 2)),
        ([plan(), valid(1, 3.0), valid(2, 3.0), valid(3, nan)], (3.0, 1)),
        ([plan(), valid(1, nan)], None),
        ([plan(), valid(1, 3.0), valid(2, 1.0, weights_step=1), valid(3, 1.0, split="test", weights_step=1)], (3.0, 1)),
        ([plan(**BY_NEAR), valid(1, 1.0, near=0.2), valid(2, 2.0, near=0.4), valid(3, 0.5, near=0.1)], (0.4, 2)),
        ([plan(first_update=9, best_value=1.5, best_step=4), valid(10, 1.7)], (1.5, 4)),
        ([plan(first_update=9, best_value=1.5, best_step=4), valid(10, 1.2)], (1.2, 10)),
        # An attempt that goes on from an earlier checkpoint forgets what was better after it.
        ([plan(), valid(5, 2.0), valid(8, 1.0), plan(first_update=6, best_value=2.0, best_step=5)], (2.0, 5)),
        # One that goes on from before the first validation forgets all.
        ([plan(), valid(8, 1.0), plan(first_update=6), valid(7, 3.0)], (3.0, 7)),
    ],
)
def test_the_best_validation_is_that_of_the_best_checkpoint(
    events: list[TrainingPlan | Validation], best: tuple[float, int] | None
) -> None:
    validations = RecordedValidations(maxlen=2)
    for event in events:
        validations.begin(event) if isinstance(event, TrainingPlan) else validations.add(event)
    found = validations.best
    assert (found and (found.value, found.step)) == best


def entry(name: str, metric: str = "loss", value: float | None = None, **changes: Any) -> dict[str, Any]:
    best = None if value is None else {"metric": metric, "value": value, "step": 4, "maximize": metric != "loss"}
    return {"id": name, "state": "finished", "valid": 2.0, "best_valid": best, "tags": (), **changes}


RUNS = [
    entry("none"),
    entry("low", "near", 0.2),
    entry("two", value=2.0),
    entry("high", "near", 0.4),
    entry("one", value=1.0),
]


def test_the_better_best_validations_come_first() -> None:
    assert [each["id"] for each in sorted_runs(RUNS, "best_valid")] == ["one", "two", "high", "low", "none"]
    assert next(each["id"] for each in sorted_runs(RUNS, "best_valid", reverse=True)) == "low"
    kept = run_filter("best_valid<=0.4")
    assert [each["id"] for each in RUNS if kept.keeps(each)] == ["low", "high"]


def test_the_best_validation_is_shown_with_its_step_where_it_is_not_the_newest() -> None:
    assert [best_cell(each) for each in RUNS] == ["", "near 0.2000 at 4", "", "near 0.4000 at 4", "1.0000 at 4"]


def test_a_loss_is_better_the_lower_it_is() -> None:
    one, two = (BestValidation(value=value, step=1) for value in (1.0, 2.0))
    assert (one.is_better_than(two), two.is_better_than(one), two.is_better_than(None)) == (True, False, True)
