from __future__ import annotations

import pytest

from trainer.contract.options import Training
from trainer.contract.outcome import answer_s
from trainer.data.batches import EpochBatches
from trainer.engine.end_conditions import Best, StepTimes, last_update, update_freq


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


@pytest.mark.parametrize(
    ("metric", "maximize", "highest"),
    [
        ("loss", None, False),
        ("accuracy", None, True),
        ("smoothed_Loss", None, False),
        ("bits_per_byte", None, False),
        ("bits_per_byte", True, True),
        ("accuracy", False, False),
    ],
)
def test_the_best_is_the_highest_of_a_metric_that_is_no_loss_and_not_named_by_the_task(
    metric: str, maximize: bool | None, highest: bool
) -> None:
    options = Training(best_metric=metric, maximize_best_metric=maximize, patience=1)
    best = Best.of(options, lower=("bits_per_byte",))
    for step, value in enumerate((2.0, 1.0, 3.0), start=1):
        best.add(value, {metric: value} if metric != "loss" else {}, step=step)
    assert best.step == (3 if highest else 2)
    assert best.end_reason(options) == ("" if highest else f"no lower {metric} in 1 validations")


@pytest.mark.parametrize("update_freq_of_epochs", [(1,), (2,), (1, 2, 1), (4, 1), (1, 2, 3, 4, 5, 6)])
def test_the_last_update_is_known_after_every_one(update_freq_of_epochs: tuple[int, ...]) -> None:
    options = Training(max_epochs=4, update_freq=update_freq_of_epochs)
    train = EpochBatches(range(35), collate=list, batch_sizes=(4, 4), rank=0, seed=1, shuffle=True)
    done, known = 0, [last_update(options, train, updates=0)]
    while train.position.epoch <= options.max_epochs:
        for update in train.updates(update_freq(options, train.position.epoch)):
            list(update)
            done += 1
            known.append(last_update(options, train, updates=done))
        train.next_epoch()
    known.append(last_update(options, train, updates=done))
    assert set(known) == {done}
