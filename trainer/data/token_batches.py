"""Cut an order of samples into batches with a maximum number of tokens, and assign the batches to ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.contract.errors import RequestError
from trainer.data.shares import MicroSteps


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
