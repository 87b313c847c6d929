"""Decisions on balanced shares, from measured times to the steps at which shares change; without ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from trainer.contract.balanced_shares import ComputeTime, equal_shares
from trainer.engine.share_balance import MIN_GAIN, WINDOW, RankFit, next_shares


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(32, 64.0)], (0.0, 2.0)),  # one share alone shows no fixed part
        ([(32, 42.0), (48, 58.0)], (10.0, 1.0)),
        ([(48, 58.0), (32, 42.0)], (10.0, 1.0)),
        ([(32, 42.0), (48, 58.0), (48, 116.0)], (20.0, 2.0)),  # a change of speed holds for both parts
        ([(32, 42.0), (33, 99.0)], (0.0, 3.0)),  # too near to show a slope
        ([(32, 42.0), (48, 42.0)], (21.0, 0.4375)),  # at most half of the time is fixed
        ([(32, 42.0), (48, 40.0)], (20.0, 0.41667)),
        ([(32, 10.0), (48, 60.0)], (0.0, 1.25)),  # no part is negative
        ([(16, 26.0), (24, 34.0), (32, 42.0), (64, 500.0), (48, 58.0)], (10.0, 1.0)),  # the median slope
    ],
)
def test_a_fit_has_a_fixed_and_a_per_sample_part(
    measured: Sequence[tuple[int, float]], expected: tuple[float, float]
) -> None:
    fit = RankFit()
    for share, ms in measured:
        fit.add(share, ms)
    assert fit.time() == pytest.approx(expected, abs=1e-4)


def test_a_fit_forgets_old_shares() -> None:
    fit = RankFit()
    for share in range(10, 40, 10):
        fit.add(share, 1.0 * share)
    for share in range(100, 100 * WINDOW + 100, 100):
        fit.add(share, 400.0 + 1.0 * share)
    assert fit.time() == pytest.approx((400.0, 1.0))


EVEN = [ComputeTime(0.0, 1.0)] * 2
UNEVEN = [ComputeTime(0.0, 1.0), ComputeTime(0.0, 3.0)]


@pytest.mark.parametrize(
    ("current", "before", "now", "expected"),
    [
        ((32, 32), UNEVEN, UNEVEN, (48, 16)),
        ((32, 32), EVEN, UNEVEN, None),  # seen once
        ((32, 32), UNEVEN, EVEN, None),  # passed
        ((32, 32), UNEVEN, UNEVEN[::-1], None),  # noise
        ((48, 16), UNEVEN, UNEVEN, None),
        ((47, 17), UNEVEN, UNEVEN, (48, 16)),  # 51 to 48 ms
        ((16, 16), EVEN, [ComputeTime(0.0, 1.0), ComputeTime(0.0, 1.04)], None),  # not worth it
    ],
)
def test_shares_change_for_a_gain_that_two_measurements_show(
    current: tuple[int, ...],
    before: Sequence[ComputeTime],
    now: Sequence[ComputeTime],
    expected: tuple[int, ...] | None,
) -> None:
    assert next_shares(current, before, now, [0, 0], sum(current)) == expected


def simulate(
    per_sample: Callable[[int, int], float], *, ranks: int, total: int, steps: int, fixed_ms: float = 0.0, seed: int = 1
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the changes of shares with their first step; ``per_sample`` gives milliseconds by step and rank."""
    source = random.Random(seed)
    current = equal_shares(total, ranks)
    fits = [RankFit() for _ in range(ranks)]
    before: list[ComputeTime] = []
    window: list[list[float]] = []
    changes: list[tuple[int, tuple[int, ...]]] = []
    for step in range(1, steps + 1):
        window.append(
            [(fixed_ms + per_sample(step, rank) * current[rank]) * (1 + source.gauss(0, 0.05)) for rank in range(ranks)]
        )
        if len(window) < WINDOW:
            continue
        for rank, fit in enumerate(fits):
            fit.add(current[rank], median(each[rank] for each in window))
        window, now = [], [fit.time() for fit in fits]
        better = next_shares(current, before, now, [0] * ranks, total) if before else None
        before = now
        if better is not None:
            changes.append((step + 1, better))
            current, before = better, []
    return changes


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_5_percent_moves_no_share_in_1000_steps(ranks: int, seed: int) -> None:
    assert simulate(lambda step, rank: 1.0, ranks=ranks, total=32 * ranks, steps=1000, seed=seed) == []


@pytest.mark.parametrize("fixed_ms", [0.0, 20.0])
@pytest.mark.parametrize("begin", range(200, 200 + WINDOW))
def test_shares_follow_a_rank_that_slows_down_within_30_steps_and_back(begin: int, fixed_ms: float) -> None:
    def per_sample(step: int, rank: int) -> float:
        return 3.0 if rank == 0 and begin <= step < 400 else 1.0

    changes = simulate(per_sample, ranks=2, total=64, steps=600, fixed_ms=fixed_ms)
    slowed = [(step, each) for step, each in changes if step < 400]
    freed = [(step, each) for step, each in changes if step >= 400]
    assert slowed[0][0] - begin <= 30
    assert freed[0][0] - 400 <= 30
    assert slowed[-1][1][0] <= 24  # 16, or a little more with a fixed part
    assert abs(freed[-1][1][0] - 32) <= 2


def test_a_slow_phase_shorter_than_a_measurement_moves_nothing() -> None:
    def per_sample(step: int, rank: int) -> float:
        return 3.0 if rank == 0 and step % 50 < WINDOW else 1.0

    assert simulate(per_sample, ranks=2, total=64, steps=1000) == []


def test_three_ranks_at_1_2_4_come_within_the_least_gain_of_their_limit() -> None:
    changes = simulate(lambda step, rank: float(2**rank), ranks=3, total=56, steps=200)
    found = changes[-1][1]
    assert max(2**rank * share for rank, share in enumerate(found)) <= 32 * (1 + 2 * MIN_GAIN)
