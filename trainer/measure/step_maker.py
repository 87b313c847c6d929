"""Makes events of the readings that a rank's training thread has taken.

Mostly on the writer's thread, some steps at a time: that costs a third of what it would between two steps, where
nothing of it is in the processor's caches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from trainer.measure.bucket_hook import Buckets
from trainer.measure.clocks import Clock, Mark
from trainer.measure.ddp_log import SyncTimes
from trainer.measure.step_events import StepMerger
from trainer.record import EventWriter, Step

Part = Literal["data", "h2d", "forward", "backward", "optimizer", "other"]
"""What a step's time goes into; ``other`` is in ``step_ms`` only."""

WARM_UP = 2
"""Synchronisations before bucket times mean anything: DDP starts with one bucket and arranges them after the first."""


class Readings(NamedTuple):
    """Of a step that is over for the host, and perhaps not yet for the device."""

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
    before: int
    """Steps measured before this one."""

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """Bytes of gradient in each bucket, in launch order."""
        return tuple(size for buckets in self.syncs for size in buckets.sizes)

    def all_marks(self) -> Iterator[Mark]:
        """Yield what the device must have reached before anything can be told."""
        yield from self.marks
        for buckets in self.syncs:
            yield from buckets.marks()


class StepMaker:
    """Keeps readings until the device has got there, and writes what they say; any thread may call it.

    Args:
        clock: That made the marks.
        writer: Where events go.
        rank: For the events.
        synchronised: Whether the ranks exchange gradients.
        wire_ratio: Bytes sent per byte of gradient; None where it cannot be told.
    """

    def __init__(
        self, clock: Clock, writer: EventWriter, *, rank: int, synchronised: bool, wire_ratio: float | None
    ) -> None:
        self.latest: Step | None = None
        """The last step that an event was made of."""
        self.longest_s = 0.0
        """The longest step of late."""
        self.fault: str | None = None
        """Why there may be no later steps; None while all is well."""
        self._clock = clock
        self._rank = rank
        self._synchronised = synchronised
        self._wire_ratio = wire_ratio
        self._layout: tuple[int, ...] = ()
        self._pending: deque[Readings] = deque()
        self._merger = StepMerger(writer)
        self._lock = threading.Lock()
        """Held by whoever makes events."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left to make an event of."""
        return not self._pending

    def add(self, readings: Readings) -> None:
        """Take a step's readings."""
        self._pending.append(readings)

    def make_all(self) -> None:
        """Turn the steps that the device has finished into events, in order."""
        with self._lock:
            while self._make_next():
                pass

    def make_one(self) -> bool:
        """Turn one step into an event, if nobody else is at it; False when nothing is left to do."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._make_next()
        finally:
            self._lock.release()

    def flush(self) -> None:
        """Write what waits to be merged with later steps."""
        with self._lock:
            self._merger.flush()

    def flush_old(self, now: float) -> None:
        """Write it when no step has come for a while; ``now`` in Unix seconds."""
        with self._lock:
            self._merger.flush_old(now)

    def _make_next(self) -> bool:
        """Turn the oldest step into an event, if the device has finished it; the caller holds the lock."""
        try:
            if not self._pending or not self._clock.ready(self._pending[0].all_marks()):
                return False
            step = self._make(self._pending.popleft())
        except RuntimeError as error:
            # A device that failed says so to whoever asks it next. That must not be the end of the writer's thread,
            # which is to record the failure, nor hide the script's own exception when it closes its meter.
            self._pending.clear()
            reason = (str(error).splitlines() or [""])[0]
            self.fault = f"reading a step's times failed, later ones may be missing: {type(error).__name__}: {reason}"
            return False
        self.latest = step
        self.longest_s = max(0.9 * self.longest_s, (step.step_ms or 0.0) * 1e-3)
        self._merger.add(step)
        return True

    def _make(self, readings: Readings) -> Step:
        clock, marks = self._clock, readings.marks
        loss, grad_norm, local = readings.numbers()
        laps = clock.laps_ms(marks)
        event = Step(
            time=readings.time,
            rank=self._rank,
            step=readings.step,
            epoch=readings.epoch,
            steps=1,
            samples=readings.samples,
            tokens=readings.tokens,
            lr=readings.lr,
            loss=loss,
            grad_norm=grad_norm,
            step_ms=sum(laps),
            gc_ms=readings.gc_s * 1e3,
        )
        milliseconds = _by_part(readings.parts, laps)
        event.data_ms = milliseconds.get("data")
        event.h2d_ms = milliseconds.get("h2d")
        event.forward_ms = milliseconds.get("forward")
        event.optimizer_ms = milliseconds.get("optimizer")
        sync, exposed = self._sync(readings)
        backward = milliseconds.get("backward")
        if backward is not None and not self._synchronised:
            event.backward_ms = backward
        elif backward is not None and exposed is not None:
            event.backward_ms = max(0.0, backward - exposed)
        event.core_wait_ms = self._core_waits(readings)
        if self._is_settled(readings):
            event.sync_ms, event.sync_exposed_ms = sync, exposed
            self._describe_buckets(event, readings)
        if local is not None:
            event.local_grad_norm = local / readings.grad_scale
        clock.release(marks[:-1])  # the last one is the first of the next step
        for buckets in readings.syncs:
            clock.release(buckets.marks())
        return event

    def _is_settled(self, readings: Readings) -> bool:
        """Tell whether the warm-up is over and the buckets are those of the synchronisation before."""
        if readings.log is not None:
            return readings.log.settled
        if not readings.syncs:
            return False
        layout, self._layout = self._layout, readings.bucket_bytes
        return readings.before >= WARM_UP and layout == self._layout

    def _sync(self, readings: Readings) -> tuple[float | None, float | None]:
        if readings.log is not None:
            return readings.log.sync_ms, readings.log.exposed_ms
        if not readings.syncs:
            return None, None
        return (
            sum(buckets.sync_ms(self._clock) for buckets in readings.syncs),
            sum(buckets.exposed_ms(self._clock) for buckets in readings.syncs),
        )

    def _core_waits(self, readings: Readings) -> dict[str, float] | None:
        """Of each part, what the thread waited for a core; the exposed synchronisation is a part of its own here."""
        waits_ms = self._clock.waits_ms(readings.marks)
        if waits_ms is None:
            return None
        waits: dict[str, float] = _by_part(readings.parts, waits_ms)
        if self._synchronised and "backward" in waits:
            in_sync = [buckets.core_wait_ms(self._clock) for buckets in readings.syncs]
            if not in_sync or None in in_sync:
                return None
            waits["sync"] = sum(waited or 0.0 for waited in in_sync)
            waits["backward"] = max(0.0, waits["backward"] - waits["sync"])
        return {part: waited for part, waited in waits.items() if waited > 0.0}

    def _describe_buckets(self, event: Step, readings: Readings) -> None:
        sizes = readings.log.bucket_bytes if readings.log is not None else None
        if readings.syncs:
            if readings.syncs[0].detailed:
                event.bucket_ms = [ms for buckets in readings.syncs for ms in buckets.bucket_ms(self._clock)]
            sizes = readings.bucket_bytes
        if sizes is not None:
            event.sync_buckets = len(sizes)
            if self._wire_ratio is not None:
                event.sync_bytes = int(sum(sizes) * self._wire_ratio)


def _by_part(parts: Sequence[Part], laps: Sequence[float]) -> dict[str, float]:
    """Add up the laps of each part; the one after the last part is of none."""
    total: dict[str, float] = {}
    for part, lap in zip(parts, laps, strict=False):
        total[part] = total.get(part, 0.0) + lap
    return total
