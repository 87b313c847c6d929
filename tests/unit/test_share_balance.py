"""Decisions on balanced shares, from measured times to the steps at which shares change; without ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from trainer.contract.balanced_shares import (
    MIN_GAIN,
    WINDOW,
    ComputeTime,
    LeastShareWatch,
    RankFit,
    ShareChoice,
    equal_shares,
)
from trainer.contract.record import Step
from trainer.engine.rank_compute import compute_ms


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
LITTLE = [ComputeTime(0.0, 1.0), ComputeTime(0.0, 1.4)]
SLIGHTLY = [ComputeTime(0.0, 1.0), ComputeTime(0.0, 1.04)]


@pytest.mark.parametrize(
    ("current", "measured", "expected"),
    [
        ((32, 32), [UNEVEN, UNEVEN], (48, 16)),
        ((32, 32), [EVEN, UNEVEN], None),  # seen once
        ((32, 32), [UNEVEN, EVEN], None),  # passed
        ((32, 32), [UNEVEN, UNEVEN[::-1]], None),  # noise
        ((32, 32), [LITTLE] * 3, None),  # 17 %, not for long enough
        ((32, 32), [LITTLE] * 4, (37, 27)),
        ((32, 32), [LITTLE, LITTLE, EVEN, LITTLE, LITTLE, LITTLE], None),  # with a break
        ((48, 16), [UNEVEN] * 9, None),
        ((46, 18), [UNEVEN] * 4, None),
        ((46, 18), [UNEVEN] * 5, (48, 16)),  # 54 to 48 ms
        ((16, 16), [SLIGHTLY] * 99, None),  # never worth it
    ],
)
def test_shares_change_for_a_gain_that_lasts(
    current: tuple[int, ...], measured: Sequence[Sequence[ComputeTime]], expected: tuple[int, ...] | None
) -> None:
    choice = ShareChoice(sum(current))
    found = [choice.add(times, current, [0, 0]) for times in measured]
    assert found[:-1] == [None] * (len(measured) - 1)
    assert found[-1] == expected


@pytest.mark.parametrize(
    ("step_ms", "exposed_ms", "core_wait_ms", "expected"),
    [
        (10.0, 4.0, None, 6.0),
        (10.0, 4.0, {"forward": 1.5, "data": 0.5, "sync": 3.0}, 4.0),  # a wait for a core within the one for others
        (10.0, 4.0, {"forward": 6.5}, 1e-6),
        (10.0, None, None, None),
        (None, 4.0, None, None),
    ],
)
def test_compute_is_a_step_without_waits_for_others_and_for_a_core(
    step_ms: float | None, exposed_ms: float | None, core_wait_ms: dict[str, float] | None, expected: float | None
) -> None:
    step = a_step(step_ms, exposed_ms, core_wait_ms)
    assert compute_ms(step, held_ms=0.0) == expected


def test_what_a_quota_holds_back_is_compute() -> None:
    assert compute_ms(a_step(10.0, 4.0, {"forward": 3.0}), held_ms=2.0) == 5.0


def a_step(step_ms: float | None, exposed_ms: float | None, core_wait_ms: dict[str, float] | None) -> Step:
    return Step(
        time=0.0,
        rank=0,
        step=1,
        epoch=1,
        steps=1,
        step_ms=step_ms,
        sync_exposed_ms=exposed_ms,
        core_wait_ms=core_wait_ms,
    )


Machine = Callable[[int, int, int], Step]
"""Step of a rank by its number, the rank and the rank's share."""


def simulate(machine: Machine, *, ranks: int, total: int, steps: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the changes of shares with their first step, agreed on every ``WINDOW`` steps and read one step later."""
    current = equal_shares(total, ranks)
    fits = [RankFit() for _ in range(ranks)]
    choice = ShareChoice(total)
    values: list[list[float]] = [[] for _ in range(ranks)]
    now: list[ComputeTime] = []
    changes: list[tuple[int, tuple[int, ...]]] = []
    for step in range(1, steps + 1):
        for rank, each in enumerate(values):
            each.append(compute_ms(machine(step, rank, current[rank]), held_ms=0.0) or 0.0)
        if now and (better := choice.add(now, current, [0] * ranks)) is not None:
            changes.append((step + 1, better))
            current, values = better, [[] for _ in range(ranks)]
            choice.begin()
        now = []
        if step % WINDOW == 1 and len(values[0]) >= WINDOW - 2:
            for rank, fit in enumerate(fits):
                fit.add(current[rank], median(values[rank]))
            values, now = [[] for _ in range(ranks)], [fit.time() for fit in fits]
    return changes


class Noise:
    """Factors by which the time of a step differs, of one kind and seed."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.source = kind, random.Random(seed)
        self.until: dict[int, int] = {}

    def in_burst(self, step: int, rank: int, *, every: int, most: int) -> bool:
        """Whether a rank is in a burst; one of up to ``most`` steps begins every so many steps on average."""
        if step > self.until.get(rank, 0) and self.source.random() < 1 / every:
            self.until[rank] = step + self.source.randint(0, most)
        return step <= self.until.get(rank, 0)

    def step(self, step: int, rank: int, ms: float) -> Step:
        source, waited_ms = self.source, 0.0
        ms *= 1 + source.gauss(0, 0.05 if self.kind == "5 percent" else 0.02)
        if self.kind == "heavy tails":
            ms *= source.lognormvariate(0, 0.1) + (source.paretovariate(1.1) - 1 if source.random() < 0.15 else 0)
        elif self.kind == "lost cores" and self.in_burst(step, rank, every=50, most=200):
            waited_ms = ms * source.uniform(0.5, 3)
        elif self.kind == "shared cores" and self.in_burst(step, rank, every=50, most=16):
            ms *= 1.35  # another process on the other hardware thread
        return a_step(ms + waited_ms + 4.0, 4.0, {"forward": waited_ms})


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("kind", ["5 percent", "heavy tails", "lost cores", "shared cores"])
@pytest.mark.parametrize("seed", range(3))
def test_noise_moves_no_share_of_a_balanced_machine_in_1000_steps(kind: str, ranks: int, seed: int) -> None:
    noise = Noise(kind, seed)
    assert (
        simulate(lambda step, rank, share: noise.step(step, rank, share), ranks=ranks, total=32 * ranks, steps=1000)
        == []
    )


@pytest.mark.parametrize("kind", ["5 percent", "heavy tails", "lost cores"])
@pytest.mark.parametrize("fixed_ms", [0.0, 5.0])
@pytest.mark.parametrize("begin", range(200, 200 + WINDOW))
def test_shares_follow_a_rank_that_slows_down_within_30_steps_and_back(kind: str, begin: int, fixed_ms: float) -> None:
    noise = Noise(kind, begin)

    def machine(step: int, rank: int, share: int) -> Step:
        slowed = rank == 0 and begin <= step < begin + 200
        return noise.step(step, rank, fixed_ms + share * (3.0 if slowed else 1.0))

    changes = simulate(machine, ranks=2, total=64, steps=440)
    slowed = [(step, each) for step, each in changes if step < begin + 200]
    freed = [(step, each) for step, each in changes if step >= begin + 200]
    assert begin < slowed[0][0] <= begin + 30
    assert begin + 200 < freed[0][0] <= begin + 230
    assert slowed[-1][1][0] <= 24  # 16, or a little more with a fixed part
    assert abs(freed[-1][1][0] - 32) <= 4


def test_a_slow_phase_as_long_as_a_measurement_moves_nothing() -> None:
    def machine(step: int, rank: int, share: int) -> Step:
        return a_step(share * (3.0 if rank == 0 and step % 50 < WINDOW else 1.0), 0.0, None)

    assert simulate(machine, ranks=2, total=64, steps=1000) == []


def test_three_ranks_at_1_2_4_come_within_the_least_gain_of_their_limit() -> None:
    changes = simulate(lambda step, rank, share: a_step(2.0**rank * share, 0.0, None), ranks=3, total=56, steps=200)
    found = changes[-1][1]
    assert max(2**rank * share for rank, share in enumerate(found)) <= 32 * (1 + 2 * MIN_GAIN)


SLOW, EVEN = (ComputeTime(20.0, 0.1), ComputeTime(1.0, 0.1)), (ComputeTime(7.0, 0.1), ComputeTime(1.0, 0.1))


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ([(SLOW, (1, 63))] * 3, (0, pytest.approx(20.1), pytest.approx(7.3))),
        ([(SLOW, (1, 63))] * 2, None),
        ([(SLOW, (1, 63)), (EVEN, (1, 63))] * 9, None),  # few steps are long, as by a CPU quota
        ([(SLOW, (2, 62))] * 9, None),
        ([(SLOW, (1, 63)), (SLOW[::-1], (63, 1))] * 9, None),
        ([(SLOW, (1, 63))] * 9, (0, pytest.approx(20.1), pytest.approx(7.3))),
    ],
)
def test_a_rank_that_is_too_slow_with_one_sample_is_told_once_by_measurements_that_agree(
    measured: list[tuple[tuple[ComputeTime, ...], tuple[int, ...]]], told: tuple[int, float, float] | None
) -> None:
    watch = LeastShareWatch()
    found = [each for each in (watch.add(times, current) for times, current in measured) if each is not None]
    assert found == ([] if told is None else [told])
