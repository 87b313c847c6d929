"""Ranks that are slower than others from the first step on, as against those that become slow or have a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from test_diagnosis import PARTS, SimulatedRun, Slow, covering, late, summaries
from test_diagnosis_causes import sample_gpus, units

from gputrain_tui.state.finding_text import finding_summary, named_ranks
from trainer.contract.record import CollectiveGroup, Finding, ModelFlops, NodeSample, RankSample, TrainingPlan

DEVICE = ("forward", "backward", "optimizer")


def of_speeds(slowness: Sequence[float], *, first: int = 1, last: int = 10**9, samples: float = 96.0) -> Slow:
    """Let each rank's device take so many times as long, in these steps."""

    def slow(step: int, rank: int) -> Mapping[str, float]:
        ratio = slowness[rank] if first <= step < last else 1.0
        return {"samples": samples, **{part: (ratio - 1.0) * PARTS[part] for part in DEVICE}}

    return slow


def both(*slow: Slow) -> Slow:
    """Add what several make longer."""

    def total(step: int, rank: int) -> Mapping[str, float]:
        extras = [each(step, rank) for each in slow]
        return {name: max(extra.get(name, 0.0) for extra in extras) for name in {n for extra in extras for n in extra}}

    return total


def simulated(ranks: int, *, noise: float = 0.02, device: str = "cpu", models: Sequence[str] = ()) -> SimulatedRun:
    """Return a run of a task, whose ranks have GPUs of these models."""
    run = SimulatedRun(ranks, noise=noise, device=device)
    run.state.apply(TrainingPlan(time=run.now, world_size=ranks, updates_per_epoch=100, samples_per_epoch=1000))
    for rank, model in enumerate(models):
        run.state.apply(
            ModelFlops(time=run.now, rank=rank, flops_per_sample=1e9, number_format="bf16", device_name=model)
        )
    return run


def raised(found: Sequence[Finding]) -> list[tuple[str, int | None, list[int]]]:
    return [(each.kind, each.rank, each.ranks) for each in found if each.state == "raised"]


SPEEDS: list[tuple[list[float], list[int], str]] = [
    ([1.0, 1.0, 1.0, 3.1], [3], "rank 3 does 31 samples in the time in which the others do 96"),
    ([1.0, 3.0], [1], "rank 1 does 32 samples in the time in which rank 0 does 96"),
    ([3.0, 3.0, 1.0, 3.0], [0, 1, 3], "ranks 0, 1, 3 do 32 samples in the time in which rank 2 does 96"),
    ([1.0, 2.0, 4.0], [1, 2], "ranks 1, 2 do 24 to 48 samples in the time in which rank 0 does 96"),
]


@pytest.mark.parametrize(("slowness", "slow", "message"), SPEEDS, ids=[str(each) for each, *_ in SPEEDS])
def test_ranks_that_are_slower_from_the_first_step_on_are_named_with_what_balancing_would_bring(
    slowness: list[float], slow: list[int], message: str
) -> None:
    run = simulated(len(slowness), noise=0.0)
    (found,) = run.steps(400, of_speeds(slowness))
    assert (found.kind, found.rank, found.ranks, found.severity) == ("uneven_speeds", None, slow, "critical")
    assert found.step is not None
    assert found.step <= 80
    # Of a step 36 ms are forward and backward pass, which shares in proportion to speed spread evenly.
    computing_ms = 36.0 * len(slowness) / sum(1 / each for each in slowness)
    step_ms = 43.0 + 36.0 * (max(slowness) - 1) + 2.5 * (max(slowness) - 1)
    then_ms = step_ms - 36.0 * max(slowness) + computing_ms
    shown_ms = found.evidence["balanced_step_ms"]
    assert found.message == (
        f'{message}: batch_size = "balanced" would take a step from {step_ms:.0f} to {shown_ms:.0f} ms'
    )
    a_sample_ms = 36.0 * max(slowness) / 96
    assert then_ms - 0.01 <= shown_ms <= then_ms + a_sample_ms
    assert "global_batch_size" in found.advice
    assert units(found) == []
    assert (finding_summary(found), named_ranks([found])) == ("uneven speeds", set(slow))


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("slowness", [[1.0, 3.0], [1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 2.0]], ids=str)
def test_uneven_speeds_are_one_finding_also_where_steps_vary(slowness: list[float], noise: float) -> None:
    run = simulated(len(slowness), noise=noise)
    assert [kind for kind, *_ in raised(run.steps(300, of_speeds(slowness)))] == ["uneven_speeds"]
    merged = simulated(len(slowness), noise=noise)
    assert [kind for kind, *_ in raised(covering(merged, 100, 6, of_speeds(slowness)))] == ["uneven_speeds"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_equal_speed_have_no_uneven_speeds_in_a_thousand_steps(ranks: int) -> None:
    assert simulated(ranks, noise=0.3).steps(1000, of_speeds([1.0] * ranks), every=6) == []


@pytest.mark.parametrize(("ratio", "kind"), [(1.15, "straggler"), (1.4, "uneven_speeds")])
def test_uneven_speeds_count_by_what_shares_in_proportion_would_bring(ratio: float, kind: str) -> None:
    """They would save 6 or 15 % of a step; with less than a tenth the rank is a straggler like any other."""
    run = simulated(2, noise=0.0, device="cuda:0")
    assert [each for each, *_ in raised(run.steps(200, of_speeds([1.0, ratio])))] == [kind]


def test_a_rank_that_becomes_slow_is_a_straggler_however_long_it_lasts() -> None:
    run = simulated(2)
    found = run.steps(900, of_speeds([1.0, 3.0], first=70))
    assert summaries(found) == [("straggler", "raised", 1, "unattributed")]


@pytest.mark.parametrize("steps", [20, 40])
def test_ranks_that_are_slow_for_a_while_from_the_first_step_on_have_no_uneven_speeds(steps: int) -> None:
    run = simulated(2)
    assert run.steps(400, of_speeds([1.0, 3.0], last=steps)) == []
    assert run.steps(50, of_speeds([1.0, 3.0], last=steps)) == []
    found = run.steps(200, of_speeds([1.0, 3.0]))
    assert summaries(found) == [("straggler", "raised", 1, "unattributed")]


def test_speeds_that_become_equal_clear_the_finding_and_a_rank_slow_again_is_a_straggler() -> None:
    run = simulated(3)
    assert raised(run.steps(200, of_speeds([1.0, 1.0, 3.0]))) == [("uneven_speeds", None, [2])]
    found = run.steps(60, of_speeds([1.0] * 3))
    assert summaries(found) == [("uneven_speeds", "cleared", None, None)]
    assert found[0].step is not None
    assert found[0].step <= 245
    assert summaries(run.steps(200, of_speeds([1.0, 1.0, 3.0]))) == [("straggler", "raised", 2, "unattributed")]


def test_what_slows_a_slower_device_besides_is_a_finding_of_its_own() -> None:
    run = simulated(3)
    assert raised(run.steps(200, of_speeds([1.0, 1.0, 3.0]))) == [("uneven_speeds", None, [2])]
    slow = of_speeds([1.0, 1.0, 3.0])
    found = run.steps(60, both(slow, late(2, first=1, data=40.0)))
    assert summaries(found) == [("straggler", "raised", 2, "data")]
    assert found[0].evidence["excess_ms"] == pytest.approx(40.0, rel=0.15)
    assert summaries(run.steps(60, slow)) == [("straggler", "cleared", 2, "data")]
    found = run.steps(200, both(slow, late(1, first=1, backward=60.0)))
    assert summaries(found)[0] == ("straggler", "raised", 1, "backward")


A, B = "NVIDIA A100-SXM4-40GB", "Tesla T4"


@pytest.mark.parametrize(
    ("models", "slowness", "expected"),
    [
        ([A, A, B], [1.0, 1.0, 3.0], [("uneven_speeds", None, [2])]),
        ([A, A, A], [1.0, 1.0, 3.0], [("straggler", 2, [])]),
        ([A, A, B, B], [1.0, 1.0, 3.0, 3.0], [("uneven_speeds", None, [2, 3])]),
        ([], [1.0, 1.0, 3.0], [("uneven_speeds", None, [2])]),
    ],
    ids=["another model", "one model: it is sick", "two of each", "not known"],
)
def test_a_gpu_of_another_model_is_slower_by_nature_and_one_of_the_same_model_has_a_fault(
    models: list[str], slowness: list[float], expected: list[tuple[str, int | None, list[int]]]
) -> None:
    run = simulated(len(slowness), device="cuda:0", models=models)
    sample_gpus(run, [1980] * len(slowness), {})
    assert raised(run.steps(300, of_speeds(slowness))) == expected


def test_a_sick_gpu_among_those_of_a_slower_model_is_named_besides() -> None:
    run = simulated(5, device="cuda:0", models=[A, A, B, B, B])
    found = run.steps(300, of_speeds([1.0, 1.0, 2.0, 2.0, 4.0]))
    assert sorted(raised(found), key=str) == [("straggler", 4, []), ("uneven_speeds", None, [2, 3, 4])]


FAULTS: list[tuple[str, Mapping[str, float], str | None]] = [
    ("forward", {"forward": 60.0}, "forward"),
    ("backward", {"backward": 60.0}, "backward"),
    ("data", {"data": 60.0}, "data"),
    ("garbage collection", {"forward": 30.0, "backward": 60.0, "gc": 85.0}, "garbage_collection"),
]


@pytest.mark.parametrize(("name", "extra", "cause"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_rank_that_is_slow_for_a_fault_from_the_first_step_on_is_a_straggler(
    name: str, extra: dict[str, float], cause: str
) -> None:
    run = simulated(3)
    found = run.steps(300, both(of_speeds([1.0] * 3), late(2, first=1, **extra)))
    assert summaries(found) == [("straggler", "raised", 2, cause)]


def test_a_gpu_that_is_hot_from_the_first_step_on_is_no_slower_device() -> None:
    run = simulated(4, device="cuda:0", models=[A, A, B, B])
    sample_gpus(run, [1980, 1980, 1980, 700], {3: ["thermal_software"]}, 88.0)
    assert summaries(run.steps(200, of_speeds([1.0, 1.0, 1.0, 3.0]))) == [("straggler", "raised", 3, "gpu_thermal")]


def test_a_cpu_quota_is_no_slower_device() -> None:
    run = simulated(2)
    for _ in range(40):
        ranks = [RankSample(rank=0), RankSample(rank=1, cpu_quota_cores=0.3, cpu_throttled_percent=70.0)]
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", cores=4, ranks=ranks))
        found = run.steps(8, of_speeds([1.0, 3.0]))
        assert "uneven_speeds" not in {each.kind for each in found}


def test_ranks_that_compute_parts_of_one_model_have_no_shares() -> None:
    run = simulated(4, device="cuda:0")
    for rank in range(4):
        group = [rank // 2 * 2, rank // 2 * 2 + 1]
        run.state.apply(CollectiveGroup(time=run.now, rank=rank, name="tp", ranks=group))
    assert "uneven_speeds" not in {each.kind for each in run.steps(200, of_speeds([1.0, 3.0, 1.0, 3.0]))}


def test_a_script_is_told_of_the_shares_that_it_may_ask_for() -> None:
    (found,) = SimulatedRun(2).steps(200, of_speeds([1.0, 3.0]))
    assert "shares by speed would take a step from" in found.message
    assert "watched.shares()" in found.advice


def test_a_batch_that_cannot_be_divided_otherwise_has_no_gain() -> None:
    run = simulated(2, device="cuda:0")
    found = run.steps(200, of_speeds([1.0, 3.0], samples=1.0))
    assert summaries(found) == [("straggler", "raised", 1, "unattributed")]


def test_nothing_is_said_of_speeds_where_samples_are_not_known() -> None:
    found = SimulatedRun(2, device="cuda:0").steps(200, of_speeds([1.0, 3.0], samples=0.0))
    assert summaries(found) == [("straggler", "raised", 1, "unattributed")]
