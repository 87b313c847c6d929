"""The comm hook: when gradient buckets are ready and reduced, and the norm of this rank's own gradient.

Its result is bit for bit what DDP computes by itself: gradients times ``1 / world_size``, then their sum. An exception
in it would leave the peers waiting for ever: everything but the collective itself is guarded, and the first fault
ends the measuring.

On CPU ranks the hook of the last bucket waits until all are reduced, which DDP would do next anyway. So no future
calls back into Python from a gloo thread, which would have to wrest the interpreter lock from the waiting one: that
costs 70–100 µs per bucket (measured with torch 2.13), this some 20 µs. On GPU ranks nothing waits, and each bucket's
end is an event recorded in its future's callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainer.telemetry.clocks import Clock, Mark

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


@dataclass(slots=True)
class Buckets:
    """The buckets of one synchronisation, in launch order."""

    detailed: bool
    """Measure each bucket's end and norm too."""
    ready: list[Mark] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of gradient in each bucket."""
    norms: list[Tensor] = field(default_factory=list)
    """Norm [] of each bucket before the reduction; only when detailed."""
    reduced: list[Mark | None] = field(default_factory=list)
    """End of each bucket, where it is measured."""
    end: Mark | None = None
    """All reduced, where it is measured as a whole: on CPU ranks, whose marks need no release."""

    def complete(self) -> bool:
        """Tell whether a synchronisation was measured to its end."""
        return self.end is not None or (bool(self.reduced) and None not in self.reduced)

    def marks(self) -> list[Mark]:
        """All marks, to ask whether they are ready and to release them."""
        return [*self.ready, *self.reduced]

    def bucket_ms(self, clock: Clock) -> list[float]:
        """Time of each bucket from ready to reduced; only when detailed."""
        return [clock.elapsed_ms(ready, end) for ready, end in zip(self.ready, self.reduced, strict=True)]

    def sync_ms(self, clock: Clock) -> float:
        """First bucket ready to all reduced."""
        return self._until_reduced(clock, self.ready[0])

    def exposed_ms(self, clock: Clock) -> float:
        """Last bucket ready to all reduced."""
        return self._until_reduced(clock, self.ready[-1])

    def norm(self) -> Tensor | float | None:
        """Norm [] of all buckets before the reduction, on the device where they are; None where it is not measured."""
        if not self.norms:
            return None
        if self.norms[0].device.type == "cpu":
            return math.hypot(*(float(norm) for norm in self.norms))
        norm: Tensor = torch.linalg.vector_norm(torch.stack(self.norms))
        return norm

    def _until_reduced(self, clock: Clock, start: Mark) -> float:
        if self.end is not None:
            return clock.elapsed_ms(start, self.end)
        # Buckets usually end in the order of their launch, but nothing says so.
        return max(clock.elapsed_ms(start, end) for end in self.reduced)


@dataclass(slots=True)
class _Known:
    """What stays the same of a bucket, on CPU ranks.

    Asking the bucket for it takes some microseconds each, between computations that leave nothing in the caches.
    """

    buffer: Tensor
    tensors: list[Tensor]
    """The buffer alone."""
    first: bool
    last: bool
    share: Tensor
    """What it is multiplied with, []: a tensor spares each product the way from a Python number, 14 of 44 µs."""
    done: torch.futures.Future[Tensor]
    """With the buffer as its value; making it costs more than all else here."""
    following: _Known | None = None
    """The next one, after the last one the first; None where that is not known yet."""


class BucketHook:
    """Averages the buckets, or lets another hook do it, and measures what ``measure`` asks for.

    Args:
        model: Where the hook is registered, for good: DDP cannot take one off again.
        clock: Of the device that the buckets are on.
        inner: A hook that does the averaging in its own way, and its ``state``. It is measured from outside.
        waits: Whether the last bucket's hook waits for all of them: on CPU ranks, without an inner hook.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        clock: Clock,
        *,
        inner: CommHook | None = None,
        state: object = None,
        waits: bool = True,
    ) -> None:
        self.fault: str | None = None
        """Why nothing is measured any more, for people; None while all is well."""
        self.waiting = False
        """Whether this rank's gradients are ready and it waits for the others'; known on CPU ranks only."""
        self._clock = clock
        self._group = model.process_group
        self._share = 1.0 / dist.get_world_size(self._group)
        self._options = dist.AllreduceOptions()
        self._under_way: list[Any] = []
        self._known: dict[int, _Known] = {}
        """Buckets by their index, until they are rebuilt."""
        self._expected: _Known | None = None
        self._measuring = False
        self._detailed = False
        self._syncs: list[Buckets] = []
        """Synchronisations not yet taken; the last one may be under way."""
        self._inner = inner
        hook = self._around if inner is not None else self._wait if waits else self._launch
        try:
            # A lambda, since DDP compares annotations, which are strings in this file, with its own classes.
            model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
        except RuntimeError:
            if inner is not None:
                raise
            self.fault = "the model has a comm hook already: buckets and the local gradient norm are not measured"

    def measure(self, *, detailed: bool = False) -> None:
        """Measure the synchronisations from here on, each bucket's end and norm too when detailed."""
        if self.fault is None:
            self._measuring, self._detailed = True, detailed

    def rest(self) -> None:
        """Measure nothing from here on."""
        self._measuring = self._detailed = False

    def take(self) -> Sequence[Buckets]:
        """Return the synchronisations since the last call; empty unless all are complete."""
        syncs = self._syncs
        if not syncs:
            return ()
        self._syncs = []
        for buckets in syncs:
            if not buckets.complete():
                return ()
        return syncs

    # ------------------------------------------------------------------------------------- three ways to reduce

    def _wait(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Launch; at the last bucket wait for all (CPU)."""
        buffer, known = bucket.buffer(), self._expected
        if known is None or known.buffer is not buffer:
            known = self._know(bucket)
        self._expected = known.following
        last = known.last
        norm = self._norm(buffer) if self._detailed else None
        buffer.mul_(known.share)
        buckets = self._ready(buffer, norm, first=known.first, last=last) if self._measuring else None
        work: Any = self._group.allreduce(known.tensors, self._options)
        if not last:
            if buckets is not None and buckets.detailed:
                work = work.get_future().then(partial(self._reduced, buckets, self._expect_end(buckets)))
            self._under_way.append(work)
            return known.done
        self.waiting = True
        for each in self._under_way:
            each.wait()
        work.wait()
        self.waiting = False
        self._under_way.clear()
        if buckets is not None:
            self._all_reduced(buckets)
        return known.done

    def _know(self, bucket: GradBucket) -> _Known:
        """Take up a bucket that was not expected: at first, and when the buckets were rebuilt."""
        index, buffer, known = bucket.index(), bucket.buffer(), self._known
        if index == 0:
            known.clear()
            self._under_way.clear()  # an iteration that failed may have left some behind
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        new = known[index] = _Known(
            buffer,
            [buffer],
            first=index == 0,
            last=bucket.is_last(),
            share=factor(self._share, buffer.dtype),
            done=done,
        )
        if index - 1 in known:
            known[index - 1].following = new
        if new.last:
            new.following = known.get(0)
        return new

    def _launch(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Launch, and record the end when the device gets there (GPU)."""
        buffer = bucket.buffer()
        norm = self._norm(buffer) if self._detailed else None
        buffer.mul_(self._share)
        buckets = self._ready(buffer, norm, first=bucket.index() == 0) if self._measuring else None
        future = self._group.allreduce([buffer], self._options).get_future()
        if buckets is None:
            return future.then(_first)
        return future.then(partial(self._reduced, buckets, self._expect_end(buckets)))

    def _around(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Let the inner hook reduce."""
        buffer = bucket.buffer()
        norm = self._norm(buffer) if self._detailed else None
        buckets = self._ready(buffer, norm, first=bucket.index() == 0) if self._measuring else None
        assert self._inner is not None
        future = self._inner(state, bucket)
        if buckets is None:
            return future
        return future.then(partial(self._inner_reduced, buckets, self._expect_end(buckets)))

    # ------------------------------------------------------------------------------------- measuring

    def _norm(self, buffer: Tensor) -> Tensor | None:
        """Norm [] of a bucket before it is averaged."""
        try:
            norm: Tensor = torch.linalg.vector_norm(buffer, dtype=torch.float32)
        except Exception as error:  # noqa: BLE001 - raising here would leave the other ranks waiting
            self._give_up(error)
            return None
        return norm

    def _ready(self, buffer: Tensor, norm: Tensor | None, *, first: bool, last: bool = False) -> Buckets | None:
        """Note that a bucket is about to be launched; None once measuring has failed.

        Args:
            buffer: The bucket's gradients [elements].
            norm: Of them, [].
            first: Whether a synchronisation begins with it.
            last: Whether the thread begins to wait for the others with it.
        """
        try:
            if first:
                self._syncs.append(Buckets(self._detailed))
            buckets = self._syncs[-1]
            buckets.sizes.append(buffer.nbytes)
            if norm is not None:
                buckets.norms.append(norm)
            buckets.ready.append(self._clock.mark(waits=last))
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return None
        return buckets

    @staticmethod
    def _expect_end(buckets: Buckets) -> int:
        """Make room for the end of the bucket that became ready last, and return its index."""
        buckets.reduced.append(None)
        return len(buckets.reduced) - 1

    def _reduced(self, buckets: Buckets, index: int, future: torch.futures.Future[list[Tensor]]) -> Tensor:
        self._mark_end(buckets, index)
        return _first(future)

    def _inner_reduced(self, buckets: Buckets, index: int, future: torch.futures.Future[Tensor]) -> Tensor:
        self._mark_end(buckets, index)
        return future.value()

    def _mark_end(self, buckets: Buckets, index: int) -> None:
        # With NCCL this runs when the collective is queued, on a stream that waits for it: an event recorded here
        # lies at the true end, a host time would not. With gloo it runs on a gloo thread, when all is reduced.
        try:
            buckets.reduced[index] = self._clock.mark(waits=False)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _all_reduced(self, buckets: Buckets) -> None:
        try:
            buckets.end = self._clock.mark()
            if buckets.detailed:
                buckets.reduced.append(buckets.end)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._measuring = self._detailed = False
        self._syncs = []
        self.fault = f"measuring a gradient bucket failed, bucket times end here: {type(error).__name__}: {error}"


def factor(number: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor [] whose product with a tensor on a CPU is the number's, bit for bit, and sooner there.

    Args:
        number: A Python number, which torch rounds to the type in which it computes the product.
        dtype: Of the other tensor. Products of short types are computed in a longer one.
    """
    return torch.tensor(number, dtype=dtype if dtype.itemsize >= 4 else torch.float64)


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
