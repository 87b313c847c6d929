"""Finishes the readings that a rank's training thread has taken: waits for the device, and tells what they say.

On the writer's thread, many steps at a time: that costs a small part of what it would between two steps, where nothing
of it is in the processor's caches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from trainer.measure.bucket_hook import Buckets
from trainer.measure.clocks import Clock, Mark
from trainer.measure.ddp_log import SyncTimes
from trainer.measure.step_events import STEP_MS, InParts, Length, Measured, Part, StepMerger
from trainer.record import EventWriter

WARM_UP = 2
"""Synchronisations before bucket times mean anything: DDP starts with one bucket and arranges them after the first."""
PARTS = {"ready": "backward", "reduced": "sync", "start": None, "end": None}
"""What a place of the clock ends, where it is no part by itself; the exposed synchronisation is one here."""


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
    waits_ms: Mapping[str, float] | None
    """What the training's thread waited for a core, by the place that it was on its way to."""
    numbers: Callable[[], list[float | None]]
    """Loss, gradient norm and, at sampled steps, the local gradient norm."""
    grad_scale: float
    log: SyncTimes | None
    syncs: Sequence[Buckets]
    """The synchronisations that the comm hook measured: one, or several where each backward pass makes one."""
    before: int
    """Steps measured before this one."""

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
        self._last: Measured | Length | None = None
        self.longest_s = 0.0
        """The longest step of late."""
        self.fault: str | None = None
        """Why there may be no later steps; None while all is well."""
        self._clock = clock
        self._synchronised = synchronised
        self._layout: tuple[int, ...] = ()
        self._pending: deque[Readings | Length] = deque()
        self.add: Callable[[Readings | Length], None] = self._pending.append
        """Take a step: its readings, or at once all that is to be known of it. Called between two steps."""
        self._merger = StepMerger(writer, rank=rank, synchronised=synchronised, wire_ratio=wire_ratio)
        self._lock = threading.Lock()
        """Held by whoever makes events."""

    @property
    def latest(self) -> Measured | None:
        """The last step that is done on the device too."""
        return None if self._last is None else Measured(*self._last)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to make an event of."""
        return not self._pending

    def make_all(self) -> None:
        """Turn the steps that the device has finished into events, in order."""
        with self._lock:
            try:
                self._make_all()
            except Exception as error:  # noqa: BLE001 - it must not end the writer's thread, see below
                # A device that failed says so to whoever asks it next. That, or a fault in here, must not be the end of
                # the writer's thread, which is to record the failure, nor hide the script's own exception when it
                # closes its meter.
                self._pending.clear()
                reason = (str(error).splitlines() or [""])[0]
                what = f"{type(error).__name__}: {reason}"
                self.fault = f"reading a step's times failed, later ones may be missing: {what}"

    def flush(self) -> None:
        """Write what waits to be merged with later steps."""
        with self._lock:
            self._merger.flush()

    def flush_old(self, now: float) -> None:
        """Write it when no step has come for a while; ``now`` in Unix seconds."""
        with self._lock:
            self._merger.flush_old(now)

    def _make_all(self) -> None:
        """Do that; the caller holds the lock."""
        pending, add = self._pending, self._merger.add
        while pending:
            first = pending[0]
            step: Measured | Length
            if not isinstance(first, Readings):
                step = first
            elif self._clock.ready(first.all_marks()):
                step = self._finish(first)
            else:
                return
            pending.popleft()
            self._last = step
            self.longest_s = max(0.9 * self.longest_s, step[STEP_MS] * 1e-3)
            add(step)

    def _finish(self, readings: Readings) -> Measured:
        clock, marks, syncs, log = self._clock, readings.marks, readings.syncs, readings.log
        loss, grad_norm, local = readings.numbers()
        sync_ms = exposed_ms = bucket_bytes = bucket_ms = None
        settled = False
        if log is not None:
            sync_ms, exposed_ms, bucket_bytes, settled = log.sync_ms, log.exposed_ms, log.bucket_bytes, log.settled
        if syncs:
            sizes = tuple([size for buckets in syncs for size in buckets.sizes])
            layout, self._layout = self._layout, sizes
            if log is None:
                sync_ms = sum([buckets.sync_ms(clock) for buckets in syncs])
                exposed_ms = sum([buckets.exposed_ms(clock) for buckets in syncs])
                settled = readings.before >= WARM_UP and layout == sizes
            bucket_bytes = sizes
            if syncs[0].detailed:
                bucket_ms = [ms for buckets in syncs for ms in buckets.bucket_ms(clock)]
        laps_ms = clock.laps_ms(marks)
        measured = Measured(
            readings.time,
            readings.step,
            readings.epoch,
            readings.samples,
            readings.tokens,
            readings.lr,
            gc_ms=readings.gc_s * 1e3,
            step_ms=sum(laps_ms),
            loss=loss,
            grad_norm=grad_norm,
            in_parts=InParts(
                readings.parts,
                laps_ms,
                local_grad_norm=None if local is None else local / readings.grad_scale,
                core_wait_ms=self._core_waits(readings),
                sync_ms=sync_ms,
                exposed_ms=exposed_ms,
                settled=settled,
                bucket_bytes=bucket_bytes,
                bucket_ms=bucket_ms,
            ),
        )
        clock.release(marks[:-1])  # the last one is the first of the next step
        for buckets in syncs:
            clock.release(buckets.marks())
        return measured

    def _core_waits(self, readings: Readings) -> Mapping[str, float] | None:
        """Of each part, what the thread waited for a core; None also where the synchronisation's are not apart."""
        waits, syncs = readings.waits_ms, readings.syncs
        if waits is None or (self._synchronised and not (syncs and all(sync.end is not None for sync in syncs))):
            return None
        by_part: dict[str, float] = {}
        for place, waited in waits.items():
            part = PARTS.get(place, place)
            if part is not None:
                by_part[part] = by_part.get(part, 0.0) + waited
        return by_part
