"""Division of micro-steps among the ranks: batches of fixed sizes, or with a maximum number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.contract.balanced_shares import equal_shares
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import require_batch_sizes
from trainer.contract.options import Training

DEFAULT_BATCH_SIZE = 32
"""Samples per rank and micro-step if neither ``--batch-size`` nor ``--max-tokens`` is given."""


def rank_batch_sizes(options: Training, world_size: int) -> tuple[int, ...]:
    """Return the batch size of each rank: the default with ``--max-tokens``, where they vary.

    Balanced ones are equal at first, the lower ranks with one sample more where they cannot be.
    """
    require_batch_sizes(options, world_size)
    if options.batch_size == "balanced":
        return equal_shares(options.global_batch_size, world_size)
    given = None if options.max_tokens else options.batch_size
    sizes = tuple(given or (DEFAULT_BATCH_SIZE,))
    return sizes * world_size if len(sizes) == 1 else sizes


@dataclass(frozen=True)
class MicroSteps:
    """Micro-steps of the rest of an epoch, each identified by the index in the order at which it starts."""

    starts: Sequence[int]
    end: Callable[[int], int]
    """Function from a start to the index at which the micro-step ends."""
    bounds: Callable[[int], tuple[int, int]]
    """Function from a start to the start and end of this rank's slice of the order; both equal if it is empty."""


@dataclass(frozen=True)
class Shares:
    """Division of the samples of one micro-step among the ranks."""

    batch_sizes: tuple[int, ...]
    rank: int
    drop_last: bool = False
    """Leave out the samples at the end that do not fill the batch of every rank."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.batch_sizes), f"rank {self.rank} of {len(self.batch_sizes)}"
        assert min(self.batch_sizes) >= 1, "a batch has at least one sample"

    @property
    def total(self) -> int:
        """Samples of all ranks in one micro-step."""
        return sum(self.batch_sizes)

    @property
    def needed(self) -> int:
        """Fewest samples that give the last rank at least one; with ``drop_last`` a whole batch."""
        return self.total if self.drop_last else self.total - self.batch_sizes[-1] + 1

    def micro_steps(self, consumed: int, samples: int) -> MicroSteps:
        total = self.total
        starts = range(consumed, samples - total + 1 if self.drop_last else samples, total)
        return MicroSteps(starts, lambda start: min(start + total, samples), self.bounds(samples))

    def smallest(self, samples: int) -> int:
        """Return the fewest samples that any rank reads in one micro-step of an epoch, dummies excluded."""
        whole, left = divmod(samples, self.total)
        sizes = list(self.batch_sizes) if whole else []
        if not self.drop_last:
            for size in self.batch_sizes:
                sizes.append(min(size, left))
                left -= sizes[-1]
        return min(size for size in sizes if size)

    def bounds(self, samples: int) -> Callable[[int], tuple[int, int]]:
        """Return a function from a micro-step's start to the start and end of this rank's slice of the order."""
        before, size = sum(self.batch_sizes[: self.rank]), self.batch_sizes[self.rank]

        def slice_of(start: int) -> tuple[int, int]:
            low = min(start + before, samples)
            return low, min(low + size, samples)

        return slice_of


@dataclass(frozen=True, kw_only=True)
class TokenLimit:
    """Limits of a batch. Its tokens are its samples times its longest sample, because shorter ones are padded."""

    max_tokens: int
    max_samples: int = 0
    """Maximum samples of a batch; 0: no limit."""
    multiple: int = 1
    """Full batches with more samples than this have a multiple of it."""

    def require_fit(self, sizes: Sequence[int], split: str) -> None:
        """Require that every sample of a split fits into a batch."""
        for index, size in enumerate(sizes):
            if size > self.max_tokens:
                raise RequestError(
                    f"sample {index} of the {split} data has {size} tokens, but --max-tokens is {self.max_tokens}: "
                    "raise it, or leave such samples out in datasets()"
                )

    def ends(self, sizes: Sequence[int]) -> list[int]:
        """Return the index in an order at which each batch ends; the cuts do not depend on later samples."""
        ends: list[int] = []
        start = longest = 0
        for index, size in enumerate(sizes):
            longest = max(longest, size)
            while start < index and self._is_full(index - start, longest):
                count = index - start
                start += count - count % self.multiple or count
                ends.append(start)
                longest = max(sizes[start : index + 1])
        return [*ends, len(sizes)] if len(sizes) > start else ends

    def _is_full(self, samples: int, longest: int) -> bool:
        """Return whether one more sample exceeds the limits; the longest, with it, has ``longest`` tokens."""
        return (samples + 1) * longest > self.max_tokens or 0 < self.max_samples <= samples


def token_micro_steps(
    begin: int, ends: Sequence[int], *, rank: int, world_size: int, drop_last: bool = False
) -> MicroSteps:
    """Divide batches of unequal size among the ranks: rank r of W reads batches r, r + W, r + 2W, ...

    The batches follow each other in the order: the first starts at ``begin``, each ends at one of ``ends``. With
    ``drop_last`` the last ones are left out if there are fewer than ranks.
    """
    begins = [begin, *ends[:-1]] if ends else []
    last = len(ends) - world_size + 1 if drop_last else len(ends)

    def end(start: int) -> int:
        return ends[min(bisect_left(begins, start) + world_size, len(ends)) - 1]

    def bounds(start: int) -> tuple[int, int]:
        index = bisect_left(begins, start) + rank
        return (begins[index], ends[index]) if index < len(ends) else (0, 0)

    return MicroSteps([begins[index] for index in range(0, last, world_size)], end, bounds)
