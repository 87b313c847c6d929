"""One step number and one loss for a run, whatever the steps that the ranks' events cover."""

from __future__ import annotations

import pytest

from gputrain_tui.history.series import Series
from gputrain_tui.report.run_comparison import block_loss
from gputrain_tui.report.step_blocks import StepBlocks
from gputrain_tui.state import RunState
from gputrain_tui.state.step_losses import loss_at, newest_loss, run_loss, samples_at
from gputrain_tui.state.totals import ZERO_TOTALS
from trainer.contract.record import Step, decode_events, encode_event, single_steps
from trainer.telemetry.step_events import merge


def event(rank: int, step: int, *losses: float) -> Step:
    mean = sum(losses) / len(losses) if losses else None
    several = len(losses) > 1
    return Step(time=float(step), rank=rank, step=step, epoch=1, steps=max(len(losses), 1), samples=1, loss=mean,
                losses=list(losses) if several else None,
                step_ms_each=[1.0] * len(losses) if several else None)  # fmt: skip


@pytest.mark.parametrize(
    ("events", "step", "loss"),
    [
        ([event(0, 7, 3.0)], 7, 3.0),
        ([event(0, 9, 5.0, 4.0, 3.0)], 9, 3.0),
        ([event(0, 9, 5.0, 4.0, 3.0)], 7, 5.0),
        ([event(0, 9, 5.0, 4.0), event(0, 7, 7.0, 6.0)], 6, 7.0),
        ([event(0, 9, 5.0, 4.0)], 3, None),
        ([event(0, 9)], 9, None),
        ([], 9, None),
    ],
)
def test_the_loss_of_a_step_is_found_in_an_event_of_several(events: list[Step], step: int, loss: float | None) -> None:
    assert loss_at(events, step) == loss


def test_the_loss_of_a_run_is_the_mean_at_the_newest_step_that_all_ranks_have_done() -> None:
    first = [event(0, 4, 8.0, 7.0, 6.0, 5.0), event(0, 6, 4.0, 3.0)]
    second = [event(1, 3, 8.0, 7.0, 6.0), event(1, 5, 5.0, 5.0)]
    assert newest_loss([first[::-1], second[::-1], []]) == (5, 4.5)
    state = RunState(world_size=2)
    state.apply_all([*first, *second])
    assert (state.step, state.figures.step, state.figures.loss) == (5, 5, 4.5)
    assert [view.loss for view in state.ranks.values()] == [3.0, 5.0]


@pytest.mark.parametrize(
    ("of_ranks", "loss"),
    [
        ([(4.0, 6.0), (2.0, 18.0)], 2.5),
        ([(4.0, 6.0), (None, 18.0)], 4.0),
        ([(4.0, 6.0), (9.0, 0.0)], 4.0),
        ([(4.0, None), (2.0, 18.0)], 3.0),
        ([(4.0, 0.0), (2.0, 0.0)], 3.0),
        ([(None, 6.0)], None),
        ([], None),
    ],
)
def test_ranks_count_by_their_samples(of_ranks: list[tuple[float | None, float | None]], loss: float | None) -> None:
    assert run_loss(of_ranks) == loss


def test_steps_that_share_an_event_count_by_the_samples_of_each() -> None:
    """Shares 2, 6 become 6, 2 within an event; a rank has no batch in the last step."""
    of_steps, losses = [(2, 6), (6, 2), (6, 0)], [(4.0, 2.0), (4.0, 2.0), (4.0, None)]
    state, series, sums = RunState(world_size=2), Series(2), [ZERO_TOTALS, ZERO_TOTALS]
    for rank in range(2):
        merged = merge([
            Step(time=1.0, rank=rank, step=number, epoch=1, steps=1, samples=both[rank], loss=values[rank], step_ms=1.0)
            for number, (both, values) in enumerate(zip(of_steps, losses, strict=True), 1)
        ])  # fmt: skip
        (read,) = decode_events(encode_event(merged))
        assert isinstance(read, Step)
        state.apply(read)
        series.apply(read)
        sums[rank] = sums[rank].plus(read)
    assert series.window("loss", 3).middle == [2.5, 3.5, 4.0]
    assert state.figures.loss == 4.0
    assert block_loss(sums) == pytest.approx((8 * 2.5 + 8 * 3.5 + 6 * 4.0) / 22)
    assert [series.axis.at("samples", number) for number in (1, 2, 3)] == [8, 16, 22]


def test_samples_of_other_than_the_covered_steps_are_passed_over() -> None:
    damaged = Step(time=1.0, rank=0, step=9, epoch=1, steps=3, samples=12, samples_each=[1, 2], loss=2.0,
                   losses=[3.0, 2.0, 1.0], step_ms=1.0, step_ms_each=[1.0] * 3)  # fmt: skip
    blocks = StepBlocks()
    for event in (damaged, event_after(damaged)):
        blocks.apply(event)
    assert [block_loss(sums) for _, _, sums in blocks.numbered()] == [3.0, 2.0, 1.0, 5.0]
    assert samples_at([damaged], 8) == 4.0
    assert [each.samples for each in single_steps(damaged)] == [4, 4, 4]


def event_after(one: Step) -> Step:
    return Step(time=2.0, rank=0, step=one.step + 1, epoch=1, steps=1, samples=4, loss=5.0, step_ms=1.0)


def test_figures_chart_status_and_comparison_have_one_loss_of_a_run_with_unequal_shares() -> None:
    state, series, sums = RunState(world_size=2), Series(2), [ZERO_TOTALS, ZERO_TOTALS]
    for number in range(1, 9):
        for rank, (loss, samples) in enumerate(((4.0, 6), (2.0, 18))):
            each = Step(time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=samples, loss=loss)
            state.apply(each)
            series.apply(each)
            sums[rank] = sums[rank].plus(each)
    assert state.figures.loss == block_loss(sums) == 2.5
    assert series.window("loss", 8).middle == [2.5] * 8
    assert newest_loss([view.last] for view in state.ranks.values() if view.last is not None) == (8, 2.5)
