"""DDP comm hook that measures when gradient buckets are ready and reduced, and the norm of this rank's own gradient.

The result is bit for bit that of DDP itself: gradients times ``1 / world_size``, then their sum. An exception in the
hook would leave the peers waiting for ever: everything but the collective itself is guarded, and the first fault ends
the measurement.

On CPU ranks the hook of the last bucket waits until all are reduced, as DDP would next. That costs some 20 µs per
bucket; callbacks from a gloo thread would contend for the interpreter lock and cost 70–100 µs (torch 2.13). On GPU
ranks nothing waits, and each bucket's end is an event recorded in its future's callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.sparse_rows import SparseRows
from trainer.telemetry import join_context
from trainer.telemetry.clocks import Clock, Mark
from trainer.telemetry.collectives.collective_meter import uncounted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


@dataclass(slots=True)
class Buckets:
    """Marks and sizes of the buckets of one synchronisation, in launch order."""

    detailed: bool
    """Whether each bucket's end and norm are measured too."""
    ready: list[Mark] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stable: bool = False
    """Whether they are those of the model's synchronisation before, which DDP has not rebuilt since."""
    unsent_bytes: int = 0
    """Bytes of rows that are zero on all ranks and were not sent."""
    norms: list[Tensor] = field(default_factory=list)
    """Norm [] of each bucket before the reduction; only when detailed."""
    reduced: list[Mark | None] = field(default_factory=list)
    """End of each bucket, where it is measured."""
    end: Mark | None = None
    """End of the last reduction, on CPU ranks, whose marks need no release."""

    def complete(self) -> bool:
        return self.end is not None or (bool(self.reduced) and None not in self.reduced)

    def marks(self) -> list[Mark]:
        return [*self.ready, *self.reduced]

    def bucket_ms(self, clock: Clock) -> list[float]:
        """Of each bucket from ready to reduced; only when detailed."""
        return [clock.elapsed_ms(ready, end) for ready, end in zip(self.ready, self.reduced, strict=True)]

    def sync_ms(self, clock: Clock) -> float:
        """From the first bucket ready to all reduced."""
        return self._until_reduced(clock, self.ready[0])

    def exposed_ms(self, clock: Clock) -> float:
        """From the last bucket ready to all reduced."""
        return self._until_reduced(clock, self.ready[-1])

    def norm(self) -> Tensor | float | None:
        """Return the norm [] of all buckets before the reduction, on their device; None where it is not measured."""
        if not self.norms:
            return None
        if self.norms[0].device.type == "cpu":
            return math.hypot(*(float(norm) for norm in self.norms))
        norm: Tensor = torch.linalg.vector_norm(torch.stack(self.norms))
        return norm

    def _until_reduced(self, clock: Clock, start: Mark) -> float:
        if self.end is not None:
            return clock.elapsed_ms(start, self.end)
        # Buckets usually end in launch order, but nothing guarantees it.
        return max(clock.elapsed_ms(start, end) for end in self.reduced)


@dataclass(slots=True)
class _CachedBucket:
    """Cached properties of a bucket, on CPU ranks.

    Each would take some microseconds to read from the ``GradBucket``, with cold caches.
    """

    buffer: Tensor
    tensors: list[Tensor]
    """``[buffer]``, the argument of allreduce."""
    first: bool
    last: bool
    share: Tensor
    """Factor of the average, []: as a tensor it makes the product 14 of 44 µs faster than a Python number."""
    done: torch.futures.Future[Tensor]
    """Completed future of the buffer; creating one costs more than all else here."""
    rows: SparseRows | None
    """Sends only the rows that are not zero; None where the bucket has no sparse gradient."""
    following: _CachedBucket | None = None
    """The next bucket, after the last one the first; None while it is unknown."""


class HookRelay:
    """Comm hook that calls a model's own hook, or a measuring hook that is put around it later."""

    def __init__(self, inner: CommHook) -> None:
        self.inner = self.hook = inner

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return self.hook(state, bucket)


class BucketHook:
    """Comm hook that averages the buckets, or calls an inner hook for that, and measures them.

    Args:
        model: Model to register the hook with; DDP cannot remove it again.
        clock: Clock of the buckets' device.
        inner: Comm hook that averages instead; it is called with ``state``.
        waits: Whether the hook of the last bucket waits for all: on CPU ranks, without an inner hook.
        sparse: Parameters whose gradients have few rows that are not zero; used where ``waits``.
        relay: Relay around whose hook this one is put, in place of being registered with the model.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        clock: Clock,
        *,
        inner: CommHook | None = None,
        state: object = None,
        waits: bool = True,
        sparse: Sequence[nn.Parameter] = (),
        relay: HookRelay | None = None,
    ) -> None:
        self.fault: str | None = None
        """Why nothing is measured any more; None without a fault."""
        self.waiting = False
        """Whether this rank waits for the others' gradients; on CPU ranks only."""
        self.nonzero_rows: dict[int, Tensor] = {}
        """Rows with values [rows] of the gradients of which only those were reduced in the last synchronisation, by the
        address of the gradient in its bucket."""
        self._clock = clock
        self._group = model.process_group
        self._share = 1.0 / dist.get_world_size(self._group)
        self._model = ref(model)
        """Weak reference: the model's reducer holds this hook, where the garbage collector would not find the cycle."""
        self._join_share: float | None = None
        """Factor of the average in this synchronisation, if ranks have run out of data; else None, for ``_share``."""
        self._matching = False
        """Whether this rank has run out of data, and only takes part in this synchronisation."""
        join_context.follow_joins()
        self._options = dist.AllreduceOptions()
        self._pending_work: list[Any] = []
        self._packed: list[SparseRows] = []
        self._sparse = {id(parameter) for parameter in sparse}
        self._cached: dict[int, _CachedBucket] = {}
        """Buckets by index, until DDP rebuilds them."""
        self._next_bucket: _CachedBucket | None = None
        self._measuring = self._detailed = False
        self._syncs: list[Buckets] = []
        """Synchronisations not yet taken; the last one may be incomplete."""
        self._sizes: Sequence[int] = ()
        """Bucket sizes of the last synchronisation that was taken."""
        self._inner = inner if relay is None else relay.inner
        self._hook: CommHook = (
            self._wrap_inner if self._inner is not None else self._reduce_and_wait if waits else self._reduce_async
        )
        # A lambda: annotations of this file are strings, which DDP would refuse.
        registered = uncounted(lambda state, bucket: self._hook(state, bucket))
        if relay is not None:
            relay.hook = registered
            return
        try:
            model.register_comm_hook(state, registered)
        except RuntimeError:
            if inner is not None:
                raise
            self.fault = "the model has a comm hook already: gradient synchronisation is not measured"

    def measure(self, *, detailed: bool = False) -> None:
        """Measure the next synchronisations, with each bucket's end and norm if detailed."""
        if self.fault is None:
            self._measuring, self._detailed = True, detailed

    def stop_measuring(self) -> None:
        self._measuring = self._detailed = False

    def average_by(self, inner: CommHook, state: object) -> None:
        """Let a comm hook that the model gets later do the averaging."""
        self._inner = lambda _, bucket: inner(state, bucket)
        self._hook = self._wrap_inner

    def take(self) -> Sequence[Buckets]:
        """Return the synchronisations since the last call; empty unless all are complete."""
        syncs = self._syncs
        if not syncs:
            return ()
        self._syncs = []
        for buckets in syncs:
            if not buckets.complete():
                return ()
            buckets.stable, self._sizes = buckets.sizes == self._sizes, buckets.sizes
        return syncs

    # ------------------------------------------------------------------------------------- three ways to reduce

    def _reduce_and_wait(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket; at the last one wait for all (CPU)."""
        buffer, cached = bucket.buffer(), self._next_bucket
        if cached is None or cached.buffer is not buffer:
            cached = self._cache(bucket)
        self._next_bucket = cached.following
        last = cached.last
        if cached.first:
            self._follow_join()
            self.nonzero_rows = {}
        measuring = self._measuring and not self._matching
        norm = self._norm(buffer) if measuring and self._detailed else None
        share = cached.share if self._join_share is None else factor(self._join_share, buffer.dtype)
        if cached.rows is None:
            buffer.mul_(share)
        buckets = self._ready(buffer, norm, first=cached.first, last=last) if measuring else None
        tensors = cached.tensors if cached.rows is None else self._pack(cached, share, buckets)
        work: Any = self._group.allreduce(tensors, self._options)
        if not last:
            if buckets is not None and buckets.detailed:
                work = work.get_future().then(self._records_end(buckets))
            self._pending_work.append(work)
            return cached.done
        self.waiting = True
        for each in self._pending_work:
            each.wait()
        work.wait()
        self.waiting = False
        self._pending_work.clear()
        for rows in self._packed:
            rows.unpack()
            self.nonzero_rows |= rows.by_address()
        self._packed.clear()
        if buckets is not None:
            self._all_reduced(buckets)
        return cached.done

    def _pack(self, cached: _CachedBucket, share: Tensor, buckets: Buckets | None) -> list[Tensor]:
        """Return the averaged tensors to reduce for a bucket with sparse gradients: its nonzero rows, or its buffer."""
        assert cached.rows is not None
        self.waiting = True
        packed = cached.rows.pack()
        self.waiting = False
        if packed is None:
            cached.buffer.mul_(share)
            return cached.tensors
        self._packed.append(cached.rows)
        if buckets is not None:
            buckets.unsent_bytes += cached.buffer.nbytes - cached.rows.sent_bytes
        return [packed.mul_(share)]

    def _cache(self, bucket: GradBucket) -> _CachedBucket:
        """Cache the properties of a bucket, on its first use and after DDP rebuilt the buckets."""
        index, buffer, cached = bucket.index(), bucket.buffer(), self._cached
        if index == 0:
            cached.clear()
            self._pending_work.clear()  # a failed iteration may have left some
            self._packed.clear()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        new = cached[index] = _CachedBucket(
            buffer,
            [buffer],
            first=index == 0,
            last=bucket.is_last(),
            share=factor(self._share, buffer.dtype),
            done=done,
            rows=self._rows_of(bucket),
        )
        if index - 1 in cached:
            cached[index - 1].following = new
        if new.last:
            new.following = cached.get(0)
        return new

    def _rows_of(self, bucket: GradBucket) -> SparseRows | None:
        if not self._sparse:
            return None
        parts = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        sparse = [gradient for parameter, gradient in parts if id(parameter) in self._sparse]
        dense = [gradient for parameter, gradient in parts if id(parameter) not in self._sparse]
        return SparseRows(self._group, sparse, dense) if sparse else None

    def _reduce_async(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket without waiting, and record its end on the device (GPU)."""
        buckets, buffer = self._begin(bucket), bucket.buffer()
        buffer.mul_(self._share if self._join_share is None else self._join_share)
        future = self._group.allreduce([buffer], self._options).get_future()
        return future.then(_first if buckets is None else self._records_end(buckets))

    def _wrap_inner(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buckets = self._begin(bucket)
        assert self._inner is not None
        future = self._inner(state, bucket)
        return future if buckets is None else future.then(self._records_end(buckets))

    def _begin(self, bucket: GradBucket) -> Buckets | None:
        """Measure the norm of a bucket and mark it as ready; None where it is not measured."""
        first = bucket.index() == 0
        if first:
            self._follow_join()
        if not self._measuring or self._matching or self._clock.is_capturing():
            return None
        buffer = bucket.buffer()
        return self._ready(buffer, self._norm(buffer) if self._detailed else None, first=first)

    def _follow_join(self) -> None:
        """Read at a synchronisation's first bucket which ranks have run out of data, in DDP's ``join()``."""
        model = self._model()
        if model is None or not model._join_config.enable:
            self._join_share, self._matching = None, False
            return
        count = join_context.ranks_with_data(model)
        self._join_share = None if count is None else 1.0 / count
        self._matching = join_context.matches_others(model)

    # ------------------------------------------------------------------------------------- measuring

    def _norm(self, buffer: Tensor) -> Tensor | None:
        try:
            # Squares of 16-bit numbers may overflow; 64-bit ones keep their type until they are summed.
            wider = torch.float32 if buffer.dtype.itemsize < 4 else None
            values = buffer.coalesce()._values() if buffer.is_sparse else buffer
            norm: Tensor = torch.linalg.vector_norm(values, dtype=wider).to(torch.float32)
        except Exception as error:  # noqa: BLE001 - raising here would leave the other ranks waiting
            self._fail(error)
            return None
        return norm

    def _ready(self, buffer: Tensor, norm: Tensor | None, *, first: bool, last: bool = False) -> Buckets | None:
        """Mark a bucket as ready and return the synchronisation it belongs to; None once measuring has failed."""
        try:
            if first:
                self._syncs.append(Buckets(self._detailed))
            buckets = self._syncs[-1]
            buckets.sizes.append(_bytes_of(buffer))
            if norm is not None:
                buckets.norms.append(norm)
            buckets.ready.append(self._clock.mark(waits=last))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return None
        return buckets

    def _records_end(self, buckets: Buckets) -> Callable[[torch.futures.Future[Any]], Tensor]:
        """Return a callback that records the end of the bucket that was made ready last, and returns its result."""
        buckets.reduced.append(None)
        return partial(self._reduced, buckets, len(buckets.reduced) - 1)

    def _reduced(self, buckets: Buckets, index: int, future: torch.futures.Future[Any]) -> Tensor:
        # With NCCL this runs when the collective is queued, on a stream that waits for it: an event recorded here
        # lies at the true end, a host time would not. With gloo it runs on a gloo thread, when all is reduced.
        try:
            buckets.reduced[index] = self._clock.mark(waits=False)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
        return _first(future)

    def _all_reduced(self, buckets: Buckets) -> None:
        try:
            buckets.end = self._clock.mark()
            if buckets.detailed:
                buckets.reduced.append(buckets.end)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.stop_measuring()
        self._syncs = []
        self.fault = f"measuring a gradient bucket failed, bucket times end here: {type(error).__name__}: {error}"


def factor(number: float, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor [], by which a CPU tensor is multiplied faster, with bit for bit the same result.

    torch rounds it to the type in which it computes the product, which is longer than a 16-bit ``dtype``.
    """
    return torch.tensor(number, dtype=dtype if dtype.itemsize >= 4 else torch.float64)


def _bytes_of(buffer: Tensor) -> int:
    """Return the bytes of a bucket; of a sparse gradient, those of its rows and their indices."""
    return buffer._indices().nbytes + buffer._values().nbytes if buffer.is_sparse else buffer.nbytes


def _first(future: torch.futures.Future[Any]) -> Tensor:
    """Return the result of a collective, which is a list of one tensor, or of a comm hook."""
    value: Tensor | list[Tensor] = future.value()
    return value[0] if isinstance(value, list) else value


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, also inside a compiled one; None without one."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model
