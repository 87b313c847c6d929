"""Shares of the global batch that let all ranks finish a micro-step at the same time; pure and torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


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


def shares(times: Sequence[ComputeTime], bounds: Sequence[int], global_batch_size: int) -> tuple[int, ...]:
    """Return the samples of each rank, at least 1, with which the slowest rank takes the least time.

    Each sample goes to the rank that would have finished it first. So a rank that gets faster never loses a sample.

    Args:
        times: of each rank.
        bounds: Most samples that the memory of each rank holds; 0: not known. Where the ranks together hold fewer
            than the global batch, each exceeds its bound by the same factor.
        global_batch_size: The sum of the shares, at least 1 per rank.
    """
    most = [bound or global_batch_size for bound in bounds]
    most = [bound * -(-global_batch_size // sum(most)) for bound in most]
    ranks = range(len(times))

    def finished(level_ms: float) -> list[int]:
        """Return the samples that each rank has finished at a time."""
        done = [int((level_ms - time.fixed_ms) / time.per_sample_ms) for time in times]
        return [max(1, min(samples, bound)) for samples, bound in zip(done, most, strict=True)]

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
