"""Compares the checksums of the ranks' models, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from trainer.contract.record import Checksum

OPEN_CHECKS = 8
"""Steps kept while the checksums of some ranks are missing."""


class ModelDifference(NamedTuple):
    """Ranks with other parameters or buffers than the majority at a step."""

    step: int
    tensors: str
    ranks: tuple[int, ...]
    """The minority, ascending; of two equal groups the one without the lowest rank."""


class DesyncState:
    """The newest comparison of all ranks' checksums."""

    def __init__(self) -> None:
        self.equal: bool | None = None
        """Whether all ranks had equal parameters and buffers at the last comparison; None before the first."""
        self.divided = False
        """Whether each rank has a part of the parameters, so that only buffers are compared."""
        self.non_finite: tuple[int, ...] = ()
        """Ranks with NaN or infinite parameters at that comparison."""
        self.difference: ModelDifference | None = None
        self._open: dict[int, dict[int, Checksum]] = {}

    def add(self, checksum: Checksum, world_size: int) -> None:
        if checksum.rank >= world_size:  # late, of a rank that is gone
            return
        checksums = self._open.setdefault(checksum.step, {})
        checksums[checksum.rank] = checksum
        if len(checksums) >= world_size:
            self._open = {step: ranks for step, ranks in self._open.items() if step > checksum.step}
            self.difference = _model_difference(checksum.step, checksums)
            self.equal = self.difference is None
            self.divided = not checksum.parameters
            self.non_finite = tuple(sorted(rank for rank, each in checksums.items() if each.non_finite))
        elif len(self._open) > OPEN_CHECKS:
            del self._open[min(self._open)]

    def restart(self, world_size: int, began: float) -> None:
        """Drop the pending checksums of before an attempt, Unix seconds, and compare later ones: its ranks are others.

        A record that is read as a whole brings those before the event of its attempt.
        """
        pending = [each for ranks in self._open.values() for each in ranks.values() if each.time >= began]
        self._open.clear()
        for checksum in sorted(pending, key=lambda each: each.step):
            self.add(checksum, world_size)

    def drop_rank(self, rank: int) -> None:
        """Drop the pending checksums of a restarted rank, which may repeat the same steps."""
        for checksums in self._open.values():
            checksums.pop(rank, None)


def _model_difference(step: int, checksums: Mapping[int, Checksum]) -> ModelDifference | None:
    for tensors in ("parameters", "buffers"):
        values = {rank: getattr(checksums[rank], tensors) for rank in sorted(checksums)}
        (common, count), *_ = Counter(values.values()).most_common(1)
        if count < len(values):
            return ModelDifference(step, tensors, tuple(rank for rank, value in values.items() if value != common))
    return None
