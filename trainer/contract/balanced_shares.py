"""Shares of the global batch that let all ranks finish a micro-step at the same time; pure and torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

WINDOW = 8
"""Steps whose median is one measurement: fewer are moved by a single stall, more answer late."""
MIN_GAIN = 0.05
"""Least relative gain in the compute of the slowest rank for which the shares change."""


class ComputeTime(NamedTuple):
    """Compute of a rank in one micro-step, waits for other ranks excluded: a fixed part, and one per sample."""

    fixed_ms: float
    per_sample_ms: float
    """Above 0."""

    def of(self, samples: int) -> float:
        """Return the milliseconds of a micro-step with so many samples."""
        return self.fixed_ms + self.per_sample_ms * samples


def equal_shares(global_batch_size: int, ranks: int) -> tuple[int, ...]:
    """Return equal shares; the lower ranks have one sample more where the global batch is no multiple of the ranks."""
    share, left = divmod(global_batch_size, ranks)
    return tuple(share + (rank < left) for rank in range(ranks))


def slowest_ms(times: Sequence[ComputeTime], shares: Sequence[int]) -> float:
    """Return the compute of the slowest rank in one micro-step, milliseconds."""
    return max(time.of(share) for time, share in zip(times, shares, strict=True))


def attainable(bounds: Sequence[int], global_batch_size: int, *, least: int = 1) -> list[int]:
    """Return the most samples of each rank; bounds and ``least`` are those of ``shares``.

    Where the ranks together hold fewer than the global batch, each exceeds its bound by the same factor.
    """
    most = [max(bound, least) if bound else global_batch_size for bound in bounds]
    return [bound * -(-global_batch_size // sum(most)) for bound in most]


def shares(
    times: Sequence[ComputeTime], bounds: Sequence[int], global_batch_size: int, *, least: int = 1
) -> tuple[int, ...]:
    """Return the samples of each rank, ``least`` or more, with which the slowest rank takes the least time.

    Each sample goes to the rank that would have finished it first. So a rank that gets faster never loses a sample.

    Args:
        times: of each rank.
        bounds: Most samples that the memory of each rank holds; 0: not known. See ``attainable``.
        global_batch_size: The sum of the shares, at least ``least`` per rank.
        least: Least share of a rank: with tokens in place of samples, those of the longest sample.
    """
    most = attainable(bounds, global_batch_size, least=least)
    ranks = range(len(times))

    def finished(level_ms: float) -> list[int]:
        """Return the samples that each rank has finished at a time."""
        done = [int((level_ms - time.fixed_ms) / time.per_sample_ms) for time in times]
        return [max(least, min(samples, bound)) for samples, bound in zip(done, most, strict=True)]

    low, high = 0.0, max(time.of(global_batch_size) for time in times)
    for _ in range(60):
        level = (low + high) / 2
        if sum(finished(level)) <= global_batch_size:
            low = level
        else:
            high = level
    found = finished(low)
    free = [(times[rank].of(found[rank] + 1), rank) for rank in ranks if found[rank] < most[rank]]
    heapq.heapify(free)
    for _ in range(global_batch_size - sum(found)):
        rank = heapq.heappop(free)[1]
        found[rank] += 1
        if found[rank] < most[rank]:
            heapq.heappush(free, (times[rank].of(found[rank] + 1), rank))
    return tuple(found)


class RankFit:
    """Fit of one rank's compute time, from one measurement for each of its recent shares."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}
        """Milliseconds of a micro-step by share, the newest last."""

    def add(self, share: int, ms: float) -> None:
        """Add a measurement. Another time at the same share is a change of speed, which holds at every share."""
        if share in self._measured:
            factor = ms / self._measured[share]
            self._measured = {each: at * factor for each, at in self._measured.items()}
        self._measured.pop(share, None)
        self._measured[share] = ms
        if len(self._measured) > WINDOW:
            del self._measured[next(iter(self._measured))]

    def time(self) -> ComputeTime:
        """Return the line through the newest measurement with the median slope of all pairs (Theil and Sen).

        Shares within an eighth of each other show no slope. The fixed part is taken as none until there is a pair, and
        as half of the time at most: a slope that is too flat would give the rank far too large a share.
        """
        share, ms = next(reversed(self._measured.items()))
        slopes = [
            (self._measured[high] - self._measured[low]) / (high - low)
            for low, high in combinations(sorted(self._measured), 2)
            if 8 * (high - low) >= high
        ]
        steepest = ms / share
        slope = min(max(median(slopes), steepest / 2), steepest) if slopes else steepest
        return ComputeTime(ms - slope * share, slope)


class ShareChoice:
    """Choice of shares by the measurements of all ranks, one after the other.

    The shares that one measurement suggests must be better by the next one too: noise, which differs between the two,
    moves nothing. They are taken once the steps since then are late by half a measurement, as they would not be with
    them: a great gain is believed at once, a small one when it lasts, and what passes brings none.
    """

    def __init__(self, global_batch_size: int, *, least: int = 1) -> None:
        self._total, self._least = global_batch_size, least
        self.begin()

    def begin(self) -> None:
        """Forget the measurements, because the shares have changed."""
        self._before: Sequence[ComputeTime] = ()
        self._lost = 0.0
        """Time lost to unfit shares by measurements without a break, in measurements."""

    def add(
        self, times: Sequence[ComputeTime], current: Sequence[int], bounds: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Add a measurement; return better shares, or None if the current ones stay."""
        before, self._before = self._before, times
        if not before:
            return None
        suggested = shares(before, bounds, self._total, least=self._least)
        gain = slowest_ms(times, current) / slowest_ms(times, suggested) - 1
        self._lost = self._lost + gain if gain >= MIN_GAIN else 0.0
        if self._lost < 0.5:
            return None
        better = shares(times, bounds, self._total, least=self._least)
        return None if better == tuple(current) else better


class LeastShareWatch:
    """A rank that is the slowest one even with one sample: told once, after measurements that agree.

    One measurement is not enough: the steps that a CPU quota holds back are few and long, and seem to be a fixed time.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._measurements = 0
        self._told = False

    def add(self, times: Sequence[ComputeTime], current: Sequence[int]) -> tuple[int, float, float] | None:
        """Add a measurement with some shares; return the rank, its time and the longest one of the others, ms."""
        agreeing = 3  # measurements in a row, of ``WINDOW`` steps each
        each = [fit.of(share) for fit, share in zip(times, current, strict=True)]
        slowest = each.index(max(each))
        others = max(ms for rank, ms in enumerate(each) if rank != slowest)
        if current[slowest] > 1 or each[slowest] < (1 + MIN_GAIN) * others:
            self._rank, self._measurements = None, 0
            return None
        self._measurements = self._measurements + 1 if slowest == self._rank else 1
        self._rank = slowest
        if self._told or self._measurements < agreeing:
            return None
        self._told = True
        return slowest, each[slowest], others
