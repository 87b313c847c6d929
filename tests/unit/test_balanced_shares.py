"""Shares by measured times: examples, and properties over random machines."""

from __future__ import annotations

import random

import pytest

from trainer.contract.balanced_shares import ComputeTime, equal_shares, shares, slowest_ms


@pytest.mark.parametrize(
    ("per_sample", "fixed", "bounds", "total", "expected"),
    [
        ((1, 1), (0, 0), (0, 0), 64, (32, 32)),
        ((1, 3), (0, 0), (0, 0), 64, (48, 16)),
        ((1, 2, 4), (0, 0, 0), (0, 0, 0), 56, (32, 16, 8)),
        ((1, 3), (10, 10), (0, 0), 64, (48, 16)),
        ((1, 1), (0, 8), (0, 0), 64, (36, 28)),  # the fixed part of rank 1 is as much as 8 samples
        ((1, 1000), (0, 0), (0, 0), 64, (63, 1)),  # at least one
        ((1, 1), (0, 1000), (0, 0), 64, (63, 1)),
        ((1, 3), (0, 0), (40, 0), 64, (40, 24)),
        ((1, 1), (0, 0), (16, 0), 64, (16, 48)),
        ((1, 1), (0, 0), (8, 16), 48, (16, 32)),  # beyond the memory of both, by the same factor
        ((5,), (3,), (0,), 7, (7,)),
    ],
)
def test_shares_follow_the_times_within_the_bounds(
    per_sample: tuple[int, ...],
    fixed: tuple[int, ...],
    bounds: tuple[int, ...],
    total: int,
    expected: tuple[int, ...],
) -> None:
    times = [ComputeTime(a, b) for a, b in zip(fixed, per_sample, strict=True)]
    assert shares(times, bounds, total) == expected


def machine(source: random.Random) -> tuple[list[ComputeTime], list[int], int]:
    ranks = source.randint(1, 12)
    times = [
        ComputeTime(source.choice([0.0, source.uniform(0, 50)]), 10 ** source.uniform(-3, 2)) for _ in range(ranks)
    ]
    total = ranks + source.randint(0, 500)
    bounds = [source.choice([0, source.randint(1, 100)]) for _ in range(ranks)]
    return times, bounds, total


@pytest.mark.parametrize("seed", range(200))
def test_shares_of_any_machine_are_whole_within_bounds_and_the_fastest(seed: int) -> None:
    source = random.Random(seed)
    times, bounds, total = machine(source)
    found = shares(times, bounds, total)
    assert sum(found) == total
    assert min(found) >= 1
    most = [bound or total for bound in bounds]
    if sum(most) >= total:
        assert all(share <= bound for share, bound in zip(found, most, strict=True))
    best = slowest_ms(times, found)
    for giver in range(len(found)):  # no single sample could move to a rank that then finishes sooner
        for taker in range(len(found)):
            if giver != taker and found[giver] > 1 and found[taker] < most[taker]:
                moved = list(found)
                moved[giver] -= 1
                moved[taker] += 1
                assert slowest_ms(times, moved) >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(100))
def test_a_rank_that_gets_faster_never_loses_a_sample(seed: int) -> None:
    source = random.Random(seed)
    times, bounds, total = machine(source)
    before = shares(times, bounds, total)
    rank = source.randrange(len(times))
    factor = source.uniform(0.1, 1.0)
    times[rank] = ComputeTime(times[rank].fixed_ms * factor, times[rank].per_sample_ms * factor)
    after = shares(times, bounds, total)
    assert after[rank] >= before[rank]
    assert all(after[other] <= before[other] for other in range(len(times)) if other != rank)


@pytest.mark.parametrize("seed", range(50))
def test_noise_of_5_percent_moves_a_share_by_little_more(seed: int) -> None:
    source = random.Random(seed)
    times, _, total = machine(source)
    times = [ComputeTime(0.0, time.per_sample_ms) for time in times]
    free = [0] * len(times)
    noisy = [ComputeTime(0.0, time.per_sample_ms * source.uniform(0.95, 1.05)) for time in times]
    for share, moved in zip(shares(times, free, total), shares(noisy, free, total), strict=True):
        assert abs(moved - share) <= 0.12 * share + 1.5


def test_equal_shares_differ_by_one_at_most() -> None:
    assert equal_shares(10, 4) == (3, 3, 2, 2)
    assert equal_shares(4, 4) == (1, 1, 1, 1)
