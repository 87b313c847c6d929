from __future__ import annotations

import pytest

from gputrain_tui.console.widgets.step_bars import LEGENDS
from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.headless.closing_report import closing_table
from gputrain_tui.headless.progress import paint
from gputrain_tui.state import RunState
from trainer.contract.record import Finding, Step, TrainingPlan


def step(number: int, *, other_ms: float | None, compute_ms: float, rank: int = 0) -> Step:
    return Step(
        time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=8, loss=1.0,
        step_ms=compute_ms + (other_ms or 0.0) + 4.0, data_ms=3.0, forward_ms=compute_ms / 2,
        backward_ms=compute_ms / 2, optimizer_ms=1.0, other_ms=other_ms,
    )  # fmt: skip


def diagnosed(
    state: RunState, *, other_ms: float | None, compute_ms: float, steps: int = 120, every: int = 1
) -> list[Finding]:
    diagnosis, found = Diagnosis(), []
    for number in range(1, steps + 1):
        for rank in state.ranks:
            here = other_ms if number % every == 0 else 0.1
            state.apply(step(number, other_ms=here, compute_ms=compute_ms, rank=rank))
        found += diagnosis.update(state, float(number))
    state.apply_all(found)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_whose_own_code_takes_most_of_a_step_is_told_so(ranks: int) -> None:
    (found,) = diagnosed(RunState(world_size=ranks, history=HISTORY), other_ms=91.0, compute_ms=5.0)
    assert (found.kind, found.severity, found.rank) == ("outside_torch", "warning", None)
    assert found.message == "91 % of a step is the script's own code between optimizer and data"
    assert "`gputrain stacks`, or K on a rank's page in the console, shows where" in found.advice


def test_a_script_whose_data_comes_from_no_loader_is_told_that_reading_it_is_in_its_own_code() -> None:
    state, diagnosis, found = RunState(world_size=1, history=HISTORY), Diagnosis(), []
    for number in range(1, 121):
        event = step(number, other_ms=91.0, compute_ms=5.0)
        event.data_ms, event.other_ms = None, 94.0
        state.apply(event)
        found += diagnosis.update(state, float(number))
    assert [finding.kind for finding in found] == ["outside_torch"]
    assert found[0].message.endswith("of a step is the script's own code between optimizer, forward and backward")
    assert "comes from no DataLoader" in found[0].advice


@pytest.mark.parametrize(
    ("other_ms", "compute_ms"),
    [(5.0, 91.0), (40.0, 45.0), (1.5, 2.0), (None, 5.0)],
    ids=["little", "much, but not the largest part", "a short step", "not measured"],
)
def test_other_parts_that_take_longer_are_no_finding_of_it(other_ms: float | None, compute_ms: float) -> None:
    found = diagnosed(RunState(world_size=1, history=HISTORY), other_ms=other_ms, compute_ms=compute_ms)
    assert "outside_torch" not in {finding.kind for finding in found}


def test_a_long_pause_after_each_epoch_is_no_share_of_a_step() -> None:
    """A script's validation, for example: the advice to do it every few steps is followed already."""
    state = RunState(world_size=1, history=HISTORY)
    assert diagnosed(state, other_ms=4000.0, compute_ms=16.0, steps=400, every=40) == []


def test_the_time_between_a_tasks_steps_is_no_advice_to_its_user() -> None:
    state = RunState(world_size=1, history=HISTORY)
    state.apply(TrainingPlan(time=0.0, world_size=1, updates_per_epoch=100, samples_per_epoch=800))
    assert diagnosed(state, other_ms=91.0, compute_ms=5.0) == []


def test_the_rest_of_a_step_has_a_name_and_the_shares_add_up() -> None:
    state = RunState(world_size=1)
    for number in range(1, 11):
        state.apply(step(number, other_ms=91.0, compute_ms=5.0))
    titles, row = (paint(line, colour=False).split() for line in closing_table(state, 120))
    shares = {title: float(cell[:-1]) for title, cell in zip(titles[::-1], row[::-1], strict=False) if "%" in cell}
    assert shares == {"data": 3.0, "compute": 5.0, "optimizer": 1.0, "other": 91.0}
    assert all(names[-1] in ("other", "…") for names in LEGENDS)
