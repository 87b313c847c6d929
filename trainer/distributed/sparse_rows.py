"""Averages gradients of which each rank has few rows that are not zero, such as those of a large embedding.

Only rows that some rank has travel: first a byte per row says which, then their values are summed. The sums are those
of a dense allreduce, because every row that is left out is zero on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

DENSE_SHARE = 0.5
"""Share of the rows from which on all are sent: packing them would cost more than it saves."""


class SparseRows:
    """The gradients of one bucket, some of them with few rows that are not zero (CPU, gloo)."""

    def __init__(self, group: Any, sparse: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
        """Keep views of the bucket.

        Args:
            group: process group whose ranks are averaged.
            sparse: gradients [rows, ...] of which few rows are not zero.
            dense: the bucket's other gradients.
        """
        self._group = group
        self._sparse = [gradient.flatten(1) for gradient in sparse]
        self._dense = [gradient.view(-1) for gradient in dense]
        self._lengths = [len(gradient) for gradient in self._sparse]
        self._most = dist.AllreduceOptions()
        self._most.reduceOp = cast(Any, dist.ReduceOp.MAX)
        self._rows: list[Tensor] = []
        self._packed: Tensor | None = None

    def pack(self) -> Tensor | None:
        """Agree on the rows and return their values and the other gradients [elements]; None when most rows are there.

        A collective: every rank calls it for the same bucket at the same time.
        """
        present = torch.cat([gradient.ne(0).any(1) for gradient in self._sparse]).to(torch.uint8)
        self._group.allreduce([present], self._most).wait()
        self._rows = [part.nonzero().view(-1) for part in torch.split(present, self._lengths)]
        if sum(map(len, self._rows)) > DENSE_SHARE * len(present):
            return None
        rows = (gradient[index].view(-1) for gradient, index in zip(self._sparse, self._rows, strict=True))
        self._packed = torch.cat([*rows, *self._dense])
        return self._packed

    def unpack(self) -> None:
        """Write the reduced values back into the bucket."""
        assert self._packed is not None
        sizes = [len(index) * gradient.shape[1] for gradient, index in zip(self._sparse, self._rows, strict=True)]
        parts = torch.split(self._packed, [*sizes, *map(len, self._dense)])
        for gradient, index, part in zip(self._sparse, self._rows, parts, strict=False):
            gradient[index] = part.view(len(index), -1)
        for whole, part in zip(self._dense, parts[len(sizes) :], strict=True):
            whole.copy_(part)
        self._packed = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that ``pack`` gave for the wire, with those that say which rows."""
        return sum(self._lengths) + (0 if self._packed is None else self._packed.nbytes)
