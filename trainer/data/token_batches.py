"""Cut an order of samples into batches with a maximum number of tokens, and assign the batches to ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.contract.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class TokenLimit:
    """Limits of a batch. Its tokens are its samples times its longest sample, because shorter ones are padded."""

    max_tokens: int
    max_samples: int = 0
    """Maximum samples of a batch; 0: no limit."""
    multiple: int = 1
    """Full batches with more samples than this have a multiple of it."""

    def require_fit(self, sizes: Sequence[int], split: str) -> None:
        """Require that every sample of a split fits into a batch.

        Raises:
            RequestError: one line that names the first sample that is too long.
        """
        for index, size in enumerate(sizes):
            if size > self.max_tokens:
                raise RequestError(
                    f"sample {index} of the {split} data has {size} tokens, but --max-tokens is {self.max_tokens}: "
                    "raise it, or leave such samples out in datasets()"
                )

    def ends(self, sizes: Sequence[int]) -> list[int]:
        """Return the index in an order at which each batch ends; the cuts do not depend on later samples.

        Args:
            sizes: tokens of each sample, in the order; none has more than ``max_tokens``.
        """
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
        """Return whether one more sample exceeds the limits; the longest, with that one, has ``longest`` tokens."""
        return (samples + 1) * longest > self.max_tokens or 0 < self.max_samples <= samples


class TokenShares:
    """Division of batches of unequal size among the ranks: rank r of W reads batches r, r + W, r + 2W, ..."""

    def __init__(self, begin: int, ends: Sequence[int], *, rank: int, world_size: int, drop_last: bool) -> None:
        """Divide consecutive batches, the first of which starts at ``begin``.

        Args:
            begin: index in the order at which the first batch starts.
            ends: index in the order at which each batch ends.
            rank: this rank.
            world_size: number of ranks.
            drop_last: leave out the last batches if there are fewer than ranks.
        """
        self._begins = [begin, *ends[:-1]] if ends else []
        self._ends = ends
        self._rank, self._world_size = rank, world_size
        last = len(ends) - world_size + 1 if drop_last else len(ends)
        self.starts = [self._begins[index] for index in range(0, last, world_size)]
        """Index in the order at which each micro-step starts."""

    def end(self, start: int) -> int:
        """Return the index in the order at which a micro-step ends."""
        return self._ends[min(bisect_left(self._begins, start) + self._world_size, len(self._ends)) - 1]

    def bounds(self, start: int) -> tuple[int, int]:
        """Return start and end of this rank's slice of the order in a micro-step; (0, 0) if it has no batch."""
        index = bisect_left(self._begins, start) + self._rank
        return (self._begins[index], self._ends[index]) if index < len(self._ends) else (0, 0)
