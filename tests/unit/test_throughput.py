from __future__ import annotations

from typing import Any

import pytest

from gputrain_tui.history.export.steps import SingleStep
from gputrain_tui.history.export.tensorboard_folder import over_ranks
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import run_throughput
from trainer.contract.record import ModelFlops, RankState, Step
from trainer.telemetry.step_events import merge

H100, L4 = 4e14, 1e14
"""Peaks of two kinds of GPU, per second."""


def a_step(rank: int, number: int, **fields: Any) -> Step:
    known: dict[str, Any] = {"samples": 8, "tokens": 800, "loss": 1.0, "step_ms": 100.0}
    return Step(time=float(number), rank=rank, step=number, epoch=1, steps=1, **(known | fields))


def flops_of(rank: int, peak: float | None, **fields: Any) -> ModelFlops:
    known: dict[str, Any] = {"flops_per_sample": 1e12, "number_format": "bf16", "device_name": "G"}
    return ModelFlops(time=0.0, rank=rank, peak_flops_per_s=peak, **(known | fields))


def state(*flops: ModelFlops, ranks: int = 2, steps: int = 3, **fields: Any) -> RunState:
    found = RunState(world_size=ranks)
    for number in range(1, steps + 1):
        for rank in range(ranks):
            found.apply(a_step(rank, number, **fields))
    found.apply_all(flops)
    return found


@pytest.mark.parametrize(
    ("flops", "mfu"),
    [
        ([flops_of(0, H100), flops_of(1, H100)], 160e12 / 8e14),
        ([flops_of(0, H100), flops_of(1, L4)], 160e12 / 5e14),
        ([flops_of(0, H100), flops_of(1, H100, flops_per_sample=3e12)], 320e12 / 8e14),
        ([flops_of(0, H100), flops_of(1, None)], None),
        ([flops_of(0, H100)], None),
        ([flops_of(0, H100), flops_of(1, H100), flops_of(1, H100, varies=True)], None),
        ([], None),
    ],
)
def test_the_utilization_is_a_share_of_the_sum_of_each_ranks_own_peak_or_absent(
    flops: list[ModelFlops], mfu: float | None
) -> None:
    found = state(*flops)
    for figures in (found.figures, run_throughput(found.ranks.values())):
        assert figures.samples_per_s == pytest.approx(160)
        assert figures.tokens_per_s == pytest.approx(16_000)
        assert figures.mfu == (None if mfu is None else pytest.approx(mfu))


def test_a_gpu_that_two_ranks_share_has_its_peak_once() -> None:
    found = state(flops_of(0, H100), flops_of(1, H100))
    for rank in range(2):
        found.apply(RankState(time=0.0, rank=rank, state="training", device="cuda:0 GPU-11"))
    assert found.figures.mfu == pytest.approx(160e12 / 4e14)


def test_after_a_restart_there_is_no_utilization_until_the_operations_are_counted_again() -> None:
    found = state(flops_of(0, H100), ranks=1)
    found.apply(RankState(time=4.0, rank=0, state="spawned"))
    found.apply(a_step(0, 4, step_ms=200.0))
    assert (found.figures.mfu, run_throughput(found.ranks.values()).mfu) == (None, None)
    found.apply(flops_of(0, L4))
    assert found.figures.mfu == run_throughput(found.ranks.values()).mfu == pytest.approx(40e12 / L4)


def test_a_step_without_a_duration_adds_neither_samples_nor_tokens_to_the_rates() -> None:
    found = state(ranks=1)
    found.apply(a_step(0, 4, step_ms=None))
    assert (found.figures.samples_per_s, found.figures.tokens_per_s) == (pytest.approx(80), pytest.approx(8000))


def test_tokens_per_second_are_of_the_steps_that_count_them_and_of_all_ranks() -> None:
    found = state(ranks=1)
    found.apply(a_step(0, 4, tokens=None, step_ms=5000.0))
    assert found.figures.tokens_per_s == pytest.approx(8000)
    assert state(tokens=None).figures.tokens_per_s is None
    one_sided = state(ranks=1)
    one_sided.apply(a_step(1, 3, tokens=None))
    assert one_sided.figures.tokens_per_s is None


def test_without_the_samples_of_most_steps_there_are_no_tokens_per_second_either() -> None:
    found = state(ranks=1, samples=None, tokens=None)
    found.apply(a_step(0, 4))
    assert run_throughput(found.ranks.values()).tokens_per_s is None


def test_a_rank_that_leaves_its_samples_to_another_one_takes_no_part_in_tokens_per_second() -> None:
    found = RunState(world_size=2)
    for rank, known in enumerate(({}, {"samples": None, "tokens": None})):
        found.apply_all(a_step(rank, number, **known) for number in range(1, 4))
    assert found.figures.tokens_per_s == pytest.approx(8000)


def test_before_a_step_there_are_no_rates() -> None:
    found = RunState(world_size=2)
    found.apply_all([flops_of(0, H100), flops_of(1, H100)])
    for figures in (found.figures, run_throughput(found.ranks.values())):
        assert (figures.samples_per_s, figures.tokens_per_s, figures.mfu) == (None, None, None)


def test_steps_of_one_event_have_tokens_together_only_if_each_has() -> None:
    assert merge([a_step(0, 1), a_step(0, 2)]).tokens == 1600
    assert merge([a_step(0, 1, tokens=None), a_step(0, 2)]).tokens is None
    assert merge([a_step(0, 1, tokens=0), a_step(0, 2)]).tokens == 800


def test_tokens_of_a_part_of_the_ranks_are_exported_as_no_total() -> None:
    def row(*tokens: int | None) -> list[SingleStep]:
        return [SingleStep(1, 1, True, a_step(rank, 1, tokens=count)) for rank, count in enumerate(tokens)]

    assert over_ranks(row(800, 700))[0]["train/tokens"] == 1500
    assert "train/tokens" not in over_ranks(row(800, None))[0]
    assert over_ranks(row(800, None))[0]["train/samples"] == 16
