"""Measures each training step of one rank: its parts, and what gradient synchronisation makes it wait.

The loop says where a part ends; everything else (clocks, DDP's logger, the bucket hook, merging, the record) is
here and in the modules this one wires. Nothing here waits for a device, and with no record nothing is measured.
The training thread only takes readings; the writer's thread makes events of them, some at a time, which costs a
third of what it would cost between two steps, where nothing of it is in the processor's caches.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.measure.bucket_hook import BucketHook, Buckets, CommHook
from trainer.measure.clocks import Clock, CudaClock, HostClock, Mark, Scalar, core_waits
from trainer.measure.ddp_log import DdpLog, SyncTimes
from trainer.measure.step_events import StepMerger
from trainer.record import Doing, EventWriter, Finding, Step

Part = Literal["data", "h2d", "forward", "backward", "optimizer", "other"]
"""What a step's time goes into; ``other`` is in ``step_ms`` only."""

NEXT: dict[Part | None, Part] = {
    None: "data",
    "data": "h2d",
    "h2d": "forward",
    "forward": "backward",
    "backward": "optimizer",
    "optimizer": "other",
    "other": "data",
}
"""What a step is at after each part; None: at its beginning."""
LONG_S = 5.0
"""From when on a part that does not end is told: this, and so many times the longest step of late."""
LONG_STEPS = 4.0
WARM_UP = 2
"""Synchronisations before bucket times mean anything: DDP starts with one bucket and arranges them after the first."""


class _Taken(msgspec.Struct, kw_only=True):
    """A step that is over for the host, and perhaps not yet for the device."""

    time: float
    step: int
    epoch: int
    samples: int
    tokens: int | None
    lr: float | None
    gc_s: float
    marks: list[Mark]
    parts: list[Part]
    """What lies between two consecutive marks; after the last part there is one more interval, of no part."""
    numbers: Callable[[], list[float | None]]
    """Loss, gradient norm and, at sampled steps, the local gradient norm."""
    grad_scale: float
    log: SyncTimes | None
    syncs: Sequence[Buckets]
    """The synchronisations that the comm hook measured: one, or several where each backward pass makes one."""
    count: int
    """Steps measured before this one."""

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        return tuple(size for buckets in self.syncs for size in buckets.sizes)

    def all_marks(self) -> Iterator[Mark]:
        yield from self.marks
        for buckets in self.syncs:
            yield from buckets.marks()


class StepMeter:
    """Measures steps; see ``start``, ``lap`` and ``end`` for what belongs to a step.

    Args:
        model: The model that is trained, wrapped in DistributedDataParallel or not.
        device: Where this rank computes; decides between the host's clock and CUDA events.
        writer: Where events go. When it is not enabled, nothing is measured and every call returns at once.
        rank: For the events.
        detail_every: Measure each bucket and the local gradient norm every so many steps; 0 installs no comm hook.
            On a GPU the comm hook is what measures synchronisation at all, so with 0 it is absent there.
        now: Unix seconds, for the events.
        clock: Seconds, for durations on the host.
        comm_hook: A hook that reduces the gradients, and its state, to be registered in any case and measured when
            measuring; None for DDP's own averaging.
        wire_ratio: Bytes that ``comm_hook`` sends per byte of gradient; None where it cannot be told.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        writer: EventWriter,
        rank: int,
        detail_every: int = 10,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        comm_hook: tuple[object, CommHook] | None = None,
        wire_ratio: float | None = 1.0,
    ) -> None:
        self._latest: Step | None = None
        self._on = writer.enabled
        self._now = now
        self._rank = rank
        self._writer = writer
        self._detail_every = detail_every
        self._wire_ratio = wire_ratio
        self._hook: BucketHook | None = None
        self._log: DdpLog | None = None
        ddp = ddp_of(model)
        self._synchronised = ddp is not None and dist.get_world_size(ddp.process_group) > 1
        if ddp is not None and comm_hook is not None and not (self._on and self._synchronised):
            ddp.register_comm_hook(*comm_hook)
        if not self._on:
            return

        self._cuda = device.type == "cuda"
        self._clock: Clock = CudaClock(device) if self._cuda else HostClock(clock, core_waits())
        if ddp is not None and self._synchronised:
            if detail_every or comm_hook:
                state, inner = comm_hook or (None, None)
                self._hook = BucketHook(
                    ddp, self._clock, inner=inner, state=state, waits=not self._cuda, meanwhile=self._catch_up
                )
            # On CPU ranks our own hook measures all there is; without it, or around another one, DDP's logger does.
            if not self._cuda and (self._hook is None or self._hook.fault is not None or comm_hook is not None):
                self._log = DdpLog(ddp)
        self._fault: str | None = None
        """Why steps are not measured any more; None while they are."""
        self._told: set[str] = set()
        self._layout: tuple[int, ...] = ()
        self._count = 0
        self._marks: list[Mark] = []
        self._parts: list[Part] = []
        self._pending: deque[_Taken] = deque()
        self._merger = StepMerger(writer)
        self._lock = threading.Lock()
        """Held by whoever makes events of pending steps."""
        self._step = 0
        self._moved: float | None = None
        """When the step last went on, by the host's clock; None between steps, and once it was told."""
        self._longest_s = 0.0
        writer.before_each_write(self._hand_over)
        self._gc_started = 0.0
        self._gc_s = 0.0
        self._host_clock = clock
        gc.callbacks.append(self._on_gc)
        self._arm()
        self._tell()

    def start(self) -> None:
        """The next step begins now.

        ``end`` starts the next step by itself, so this is called once before the first step and again after
        whatever must not count as a step's time: a validation, a checkpoint.
        """
        if not self._on:
            return
        # The old mark is not released: it is also the end of the last step, which may still be under way.
        self._marks = [self._clock.mark()]
        self._parts = []
        self._gc_s = 0.0
        self._moved = self._host_clock()

    def lap(self, part: Part) -> None:
        """The time since the last mark belongs to this part; micro-steps add up."""
        if not self._on:
            return
        self._parts.append(part)
        self._marks.append(self._clock.mark())
        self._moved = self._host_clock()

    def end(
        self,
        *,
        step: int,
        epoch: int,
        loss: Scalar = None,
        samples: int,
        tokens: int | None = None,
        lr: float | None = None,
        grad_norm: Scalar = None,
        grad_scale: float = 1.0,
    ) -> None:
        """The step is over, and the next one begins.

        Args:
            step: Optimizer steps done, from 1.
            epoch: From 1.
            loss: This rank's mean loss in nats; a tensor on the device is fetched without waiting for it.
            samples: Samples that this rank read in the step.
            tokens: Tokens that this rank read in the step.
            lr: Learning rate of the step.
            grad_norm: Global norm of the gradient after the reduction, before clipping.
            grad_scale: What the gradients were multiplied with during backward and are not afterwards (a loss scale,
                a normalisation after the reduction); the local gradient norm is divided by it.
        """
        if not self._on:
            return
        log = self._log.read() if self._log is not None else None
        syncs = self._hook.take() if self._hook is not None else ()
        # After a first synchronisation the gradient is not this rank's alone any more.
        local = syncs[0].norm() if len(syncs) == 1 else None
        numbers = self._clock.fetch([loss, grad_norm, local])
        end = self._clock.mark()
        self._marks.append(end)
        self._pending.append(
            _Taken(
                time=self._now(),
                step=step,
                epoch=epoch,
                samples=samples,
                tokens=tokens,
                lr=lr,
                gc_s=self._gc_s,
                marks=self._marks,
                parts=self._parts,
                numbers=numbers,
                grad_scale=grad_scale,
                log=log,
                syncs=syncs,
                count=self._count,
            )
        )
        self._count += 1
        self._step = step
        self._moved = self._host_clock()
        self._marks = [end]
        self._parts = []
        self._gc_s = 0.0
        self._arm()

    @property
    def latest(self) -> Step | None:
        """The last step whose measurements are complete; None while there is none, and without a record."""
        if self._on:
            self._complete()
        return self._latest

    def pause(self) -> None:
        """Write what is measured but not yet written, before something that may take long; ``start`` goes on."""
        if self._on:
            self._moved = None
            self._complete()
            with self._lock:
                self._merger.flush()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the last steps; a device that hangs cannot hold the caller longer than the time-out."""
        if not self._on:
            return
        self._moved = None
        deadline = time.monotonic() + timeout_s
        self._complete()
        while self._pending and time.monotonic() < deadline:
            time.sleep(0.001)
            self._complete()
        with self._lock:
            self._merger.flush()
        gc.callbacks.remove(self._on_gc)
        self._on = False

    def _arm(self) -> None:
        """Decide what the next step measures; all ranks count alike, so they sample the same steps."""
        if self._hook is None or not self._detail_every:
            return
        sampled = self._count >= WARM_UP and (self._count == WARM_UP or self._count % self._detail_every == 0)
        # Where the hook is the only source of synchronisation times, it measures those at every step.
        if sampled or self._log is None:
            self._hook.measure(detailed=sampled)

    def _hand_over(self, last: bool) -> None:
        """Make events of what has gathered; the writer's thread calls this."""
        self._complete()
        with self._lock:
            if last:
                self._merger.flush()
            else:
                self._merger.flush_old(self._now())
                self._tell_long_wait()

    def _complete(self) -> None:
        """Turn steps that the device has finished into events, in order."""
        with self._lock:
            while self._complete_next():
                pass
            self._tell()

    def _catch_up(self) -> bool:
        """Turn one step into an event while this rank waits for the others anyway; False when nothing is left to do.

        What is done here the writer's thread need not do, which would keep the interpreter lock from the training.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._complete_next()
        finally:
            self._lock.release()

    def _complete_next(self) -> bool:
        """Turn the oldest step into an event, if the device has finished it; the caller holds the lock."""
        try:
            if not self._pending or not self._clock.ready(self._pending[0].all_marks()):
                return False
            step = self._finish(self._pending.popleft())
        except RuntimeError as error:
            # A device that failed says so to whoever asks it next. That must not be the end of the writer's thread,
            # which is to record the failure, nor hide the script's own exception in ``close``.
            self._pending.clear()
            reason = (str(error).splitlines() or [""])[0]
            self._fault = f"reading a step's times failed, later ones may be missing: {type(error).__name__}: {reason}"
            return False
        self._latest = step
        self._longest_s = max(0.9 * self._longest_s, (step.step_ms or 0.0) * 1e-3)
        self._merger.add(step)
        return True

    def _finish(self, taken: _Taken) -> Step:
        clock, marks = self._clock, taken.marks
        loss, grad_norm, local = taken.numbers()
        laps = clock.laps_ms(marks)
        event = Step(
            time=taken.time,
            rank=self._rank,
            step=taken.step,
            epoch=taken.epoch,
            steps=1,
            samples=taken.samples,
            tokens=taken.tokens,
            lr=taken.lr,
            loss=loss,
            grad_norm=grad_norm,
            step_ms=sum(laps),
            gc_ms=taken.gc_s * 1e3,
        )
        milliseconds = _by_part(taken.parts, laps)
        event.data_ms = milliseconds.get("data")
        event.h2d_ms = milliseconds.get("h2d")
        event.forward_ms = milliseconds.get("forward")
        event.optimizer_ms = milliseconds.get("optimizer")
        sync, exposed = self._sync(taken)
        backward = milliseconds.get("backward")
        if backward is not None and not self._synchronised:
            event.backward_ms = backward
        elif backward is not None and exposed is not None:
            event.backward_ms = max(0.0, backward - exposed)
        event.core_wait_ms = self._core_waits(taken)
        if self._is_settled(taken):
            event.sync_ms, event.sync_exposed_ms = sync, exposed
            self._describe_buckets(event, taken)
        if local is not None:
            event.local_grad_norm = local / taken.grad_scale
        clock.release(marks[:-1])  # the last one is the first of the next step
        for buckets in taken.syncs:
            clock.release(buckets.marks())
        return event

    def _is_settled(self, taken: _Taken) -> bool:
        """Tell whether the warm-up is over and the buckets are those of the synchronisation before."""
        if taken.log is not None:
            return taken.log.settled
        if not taken.syncs:
            return False
        layout, self._layout = self._layout, taken.bucket_bytes
        return taken.count >= WARM_UP and layout == self._layout

    def _sync(self, taken: _Taken) -> tuple[float | None, float | None]:
        if taken.log is not None:
            return taken.log.sync_ms, taken.log.exposed_ms
        if not taken.syncs:
            return None, None
        return (
            sum(buckets.sync_ms(self._clock) for buckets in taken.syncs),
            sum(buckets.exposed_ms(self._clock) for buckets in taken.syncs),
        )

    def _core_waits(self, taken: _Taken) -> dict[str, float] | None:
        """Of each part, what the thread waited for a core; the exposed synchronisation is a part of its own here."""
        waits_ms = self._clock.waits_ms(taken.marks)
        if waits_ms is None:
            return None
        waits: dict[str, float] = _by_part(taken.parts, waits_ms)
        if self._synchronised and "backward" in waits:
            in_sync = [buckets.core_wait_ms(self._clock) for buckets in taken.syncs]
            if not in_sync or None in in_sync:
                return None
            waits["sync"] = sum(waited or 0.0 for waited in in_sync)
            waits["backward"] = max(0.0, waits["backward"] - waits["sync"])
        return {part: waited for part, waited in waits.items() if waited > 0.0}

    def _describe_buckets(self, event: Step, taken: _Taken) -> None:
        sizes = taken.log.bucket_bytes if taken.log is not None else None
        if taken.syncs:
            if taken.syncs[0].detailed:
                event.bucket_ms = [ms for buckets in taken.syncs for ms in buckets.bucket_ms(self._clock)]
            sizes = taken.bucket_bytes
        if sizes is not None:
            event.sync_buckets = len(sizes)
            if self._wire_ratio is not None:
                event.sync_bytes = int(sum(sizes) * self._wire_ratio)

    def _tell_long_wait(self) -> None:
        """Say what a step that does not go on is at; called by the writer's thread."""
        moved = self._moved
        if moved is None or (waited_s := self._host_clock() - moved) < max(LONG_S, LONG_STEPS * self._longest_s):
            return
        self._moved = None
        parts = self._parts
        part: Any = NEXT[parts[-1] if parts else None]
        if part == "backward" and self._hook is not None and self._hook.waiting:
            part = "sync"
        self._writer.write(
            Doing(
                time=self._now(),
                rank=self._rank,
                step=self._step + 1,
                part=part,
                parts_done=len(parts) + (part == "sync"),
                waited_ms=round(waited_s * 1e3, 1),
            )
        )

    def _on_gc(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._gc_started = self._host_clock()
        else:
            self._gc_s += self._host_clock() - self._gc_started

    def _tell(self) -> None:
        """Say once why something is not measured."""
        faults = [self._fault, *(source.fault for source in (self._log, self._hook) if source is not None)]
        for fault in faults:
            if fault is not None and fault not in self._told:
                self._told.add(fault)
                self._writer.write(
                    Finding(
                        time=self._now(),
                        kind="not_measured",
                        severity="info",
                        rank=self._rank,
                        message=fault,
                    )
                )


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper inside a model that may be compiled around it, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model


def _by_part(parts: Sequence[Part], laps: Sequence[float]) -> dict[str, float]:
    """Add up the laps of each part; the one after the last part is of none."""
    total: dict[str, float] = {}
    for part, lap in zip(parts, laps, strict=False):
        total[part] = total.get(part, 0.0) + lap
    return total
