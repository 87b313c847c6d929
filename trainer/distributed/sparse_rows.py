"""Reduce gradients with few nonzero rows, such as those of a large embedding, by sending those rows only.

First the ranks reduce one byte per row that marks rows with values, then the values of the rows marked on any rank.
The sums equal those of a dense allreduce, because every row that is left out is zero on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

DENSE_SHARE = 0.5
"""Share of nonzero rows above which the whole bucket is sent: packing would cost more than it saves."""


class SparseRows:
    """Gradients of one bucket, some of them with few nonzero rows (CPU, gloo)."""

    def __init__(self, group: Any, sparse: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
        self._group = group
        self._sparse = [gradient.flatten(1) for gradient in sparse]
        self._dense = [gradient.view(-1) for gradient in dense]
        self._lengths = [len(gradient) for gradient in self._sparse]
        self._max = dist.AllreduceOptions()
        self._max.reduceOp = cast(Any, dist.ReduceOp.MAX)
        self._rows: list[Tensor] = []
        self._packed: Tensor | None = None

    def pack(self) -> Tensor | None:
        """Agree on the nonzero rows; return their values and the dense gradients [elements], or None above DENSE_SHARE.

        A collective: every rank calls it for the same bucket at the same time.
        """
        # The greatest byte of each row: a fifth of the time of comparing its numbers with 0.
        present = torch.cat([gradient.view(torch.uint8).amax(1) for gradient in self._sparse])
        self._group.allreduce([present], self._max).wait()
        self._rows = [part.nonzero().view(-1) for part in torch.split(present, self._lengths)]
        if sum(map(len, self._rows)) > DENSE_SHARE * len(present):
            return None
        rows = (gradient[index].view(-1) for gradient, index in zip(self._sparse, self._rows, strict=True))
        self._packed = torch.cat([*rows, *self._dense])
        return self._packed

    def unpack(self) -> None:
        assert self._packed is not None
        sizes = [len(index) * gradient.shape[1] for gradient, index in zip(self._sparse, self._rows, strict=True)]
        parts = torch.split(self._packed, [*sizes, *map(len, self._dense)])
        for gradient, index, part in zip(self._sparse, self._rows, parts, strict=False):
            gradient[index] = part.view(len(index), -1)
        for whole, part in zip(self._dense, parts[len(sizes) :], strict=True):
            whole.copy_(part)
        self._packed = None

    def by_address(self) -> dict[int, Tensor]:
        """Return the rows with values [rows] of each gradient, by the address of its first number."""
        return {gradient.data_ptr(): index for gradient, index in zip(self._sparse, self._rows, strict=True)}

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends: those returned by ``pack``, and the byte per row that marks nonzero rows."""
        return sum(self._lengths) + (0 if self._packed is None else self._packed.nbytes)
