"""Compares the ranks' checksums step by step as they come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from trainer.contract.record import Checksum

OPEN_CHECKS = 8
"""Steps with checksums of some ranks that are kept until the others' come."""


class ModelDifference(NamedTuple):
    """What sets some ranks apart."""

    step: int
    what: str
    """``parameters`` or ``buffers``."""
    ranks: tuple[int, ...]
    """Those that hold other ones than the most do, ascending; of two equal parts the one without the lowest rank."""


class DesyncState:
    """Compares checksums of the same step."""

    def __init__(self) -> None:
        self.equal: bool | None = None
        """Whether all ranks held equal parameters and buffers when all had last told; None while that never was."""
        self.difference: ModelDifference | None = None
        """What differed then."""
        self._open: dict[int, dict[int, Checksum]] = {}
        """By step and rank."""

    def note(self, checksum: Checksum, world_size: int) -> None:
        """Take up what a rank holds after a step."""
        told = self._open.setdefault(checksum.step, {})
        told[checksum.rank] = checksum
        if len(told) >= world_size:
            self._open = {step: ranks for step, ranks in self._open.items() if step > checksum.step}
            self.difference = _model_difference(checksum.step, told)
            self.equal = self.difference is None
        elif len(self._open) > OPEN_CHECKS:
            del self._open[min(self._open)]

    def forget(self, rank: int) -> None:
        """Drop what waits of a rank that begins anew, and may come to the same steps once more."""
        for told in self._open.values():
            told.pop(rank, None)


def _model_difference(step: int, told: Mapping[int, Checksum]) -> ModelDifference | None:
    for what in ("parameters", "buffers"):
        values = {rank: getattr(told[rank], what) for rank in sorted(told)}
        (common, count), *_ = Counter(values.values()).most_common(1)
        if count < len(values):
            return ModelDifference(step, what, tuple(rank for rank, value in values.items() if value != common))
    return None
