"""The comm hook of sampled steps: when each gradient bucket was ready and reduced, and the local gradient's norm.

A hook cannot be taken off again, and a Python hook costs some tens of microseconds per bucket even when it does not
measure; so it is installed only when asked for. An exception in it would leave the peers waiting for ever:
everything but the collective itself is guarded, and the first fault ends the measuring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainer.clocks import Clock, Mark

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


@dataclass(slots=True)
class Buckets:
    """The buckets of one synchronisation, in launch order."""

    ready: list[Mark] = field(default_factory=list)
    reduced: list[Mark | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of gradient in each bucket."""
    norms: list[Tensor] = field(default_factory=list)
    """Norm of each bucket before the reduction, 0-dim; only when norms were asked for."""

    def complete(self) -> bool:
        """Tell whether every bucket that was launched has its end."""
        return bool(self.ready) and None not in self.reduced

    def marks(self) -> list[Mark]:
        """All marks, to ask whether they are ready and to release them."""
        return [*self.ready, *self.reduced]

    def milliseconds(self, clock: Clock) -> list[float]:
        """Time of each bucket from ready to reduced."""
        return [clock.elapsed_ms(ready, end) for ready, end in zip(self.ready, self.reduced, strict=True)]

    def sync_ms(self, clock: Clock) -> float:
        """First bucket ready to all reduced; the end is the latest one, whatever order they came in."""
        return max(clock.elapsed_ms(self.ready[0], end) for end in self.reduced)

    def exposed_ms(self, clock: Clock) -> float:
        """Last bucket ready to all reduced."""
        return max(clock.elapsed_ms(self.ready[-1], end) for end in self.reduced)


class BucketHook:
    """Averages the buckets, or lets another hook do it, and measures when told to.

    Without another hook the result is bit for bit what DDP computes by itself: gradients times ``1 / world_size``,
    then their sum.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        clock: Clock,
        *,
        inner: CommHook | None = None,
        state: object = None,
    ) -> None:
        self.fault: str | None = None
        """Why nothing is measured any more, for people; None while all is well."""
        self._clock = clock
        self._group = model.process_group
        self._share = 1.0 / dist.get_world_size(self._group)
        self._inner = inner
        self._buckets: Buckets | None = None
        self._with_norms = False
        try:
            # A lambda, since DDP compares annotations, which are strings in this file, with its own classes.
            model.register_comm_hook(state, lambda state, bucket: self._hook(state, bucket))
        except RuntimeError:
            if inner is not None:
                raise
            self.fault = "the model has a comm hook already: buckets and the local gradient norm are not measured"

    def measure(self, *, norms: bool) -> None:
        """Measure the next synchronisation."""
        if self.fault is None:
            self._buckets = Buckets()
            self._with_norms = norms

    def take(self) -> Buckets | None:
        """Return what was measured since ``measure``, and stop measuring."""
        buckets, self._buckets = self._buckets, None
        return buckets if buckets is not None and self.fault is None and buckets.complete() else None

    def _hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        slot = None if self._buckets is None else self._begin(self._buckets, buffer)
        if self._inner is not None:
            future = self._inner(state, bucket)
            return future if slot is None else future.then(partial(self._end_inner, *slot))
        buffer.mul_(self._share)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None, "a rank outside its model's process group runs backward"
        return work.get_future().then(_first if slot is None else partial(self._end, *slot))

    def _begin(self, buckets: Buckets, buffer: Tensor) -> tuple[Buckets, int] | None:
        try:
            if self._with_norms:
                buckets.norms.append(torch.linalg.vector_norm(buffer, dtype=torch.float32))
            buckets.sizes.append(buffer.nbytes)
            # The mark follows the norm: the norm is a cost of measuring, not of the wire.
            buckets.ready.append(self._clock.mark())
            buckets.reduced.append(None)
        except Exception as error:  # noqa: BLE001 - raising here would leave the other ranks waiting
            self._give_up(error)
            return None
        return buckets, len(buckets.ready) - 1

    def _end(self, buckets: Buckets, index: int, future: torch.futures.Future[list[Tensor]]) -> Tensor:
        self._mark_end(buckets, index)
        return _first(future)

    def _end_inner(self, buckets: Buckets, index: int, future: torch.futures.Future[Tensor]) -> Tensor:
        self._mark_end(buckets, index)
        return future.value()

    def _mark_end(self, buckets: Buckets, index: int) -> None:
        # With NCCL this runs when the collective is queued, on a stream that waits for it: an event recorded here
        # lies at the true end, a host time would not. With gloo it runs on a gloo thread, when all is reduced.
        try:
            buckets.reduced[index] = self._clock.mark()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._buckets = None
        self.fault = f"measuring a gradient bucket failed, bucket times end here: {type(error).__name__}: {error}"


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
