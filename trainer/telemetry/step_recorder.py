"""Waits until the device has done a step, and writes its event, on the writer's thread.

There it costs a small part of what it would between two steps, where nothing of it is in the processor's caches.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from trainer.contract.record import EventWriter, Step
from trainer.telemetry.clocks import Clock
from trainer.telemetry.step_events import StepReading, merge, step_event, synchronisation

INTERVAL_S = 0.05
"""Steps that end within this time share an event, so that the record of fast steps stays small."""
DECAY = 0.9
"""By how much the longest step of late counts less after each further step."""


class StepRecorder:
    """Keeps the readings of steps until the device has got there, and writes their events; any thread may call it.

    Args:
        clock: That made the marks.
        writer: Where events go.
        rank: For the events.
        synchronised: Whether the ranks exchange gradients.
        wire_ratio: Bytes sent per byte of gradient; None where it is not known.
    """

    def __init__(
        self,
        clock: Clock,
        writer: EventWriter,
        *,
        rank: int,
        synchronised: bool = False,
        wire_ratio: float | None = 1.0,
    ) -> None:
        self.latest: Step | None = None
        """The last step that the device has done too."""
        self.longest_s = 0.0
        """The longest step of late."""
        self.fault: str | None = None
        """Why later steps may be missing; None while all is well."""
        self._clock = clock
        self._writer = writer
        self._rank = rank
        self._synchronised = synchronised
        self._wire_ratio = wire_ratio
        self._layout: Sequence[int] = ()
        """Sizes of the buckets at the step before."""
        self._pending: deque[StepReading] = deque()
        self.add: Callable[[StepReading], None] = self._pending.append
        """Take the readings of a step; called between two steps."""
        self._waiting: list[Step] = []
        """Steps that may share an event with later ones."""
        self._written = -math.inf
        """When the last step was done that is written, in Unix seconds."""
        self._lock = threading.Lock()
        """Held by whoever makes events."""

    @property
    def idle(self) -> bool:
        """Whether no reading is left to make an event of."""
        return not self._pending

    def process(self) -> None:
        """Turn the steps that the device has done into events, in order."""
        with self._lock:
            try:
                while self._pending and self._clock.ready(self._pending[0].all_marks()):
                    self._record(self._pending.popleft())
            except Exception as error:  # noqa: BLE001 - it must not end the writer's thread, see below
                # A device that failed raises in whoever asks it next. That, or a fault in here, must not be the end of
                # the writer's thread, which is to record the failure, nor hide the script's own exception when it
                # closes its meter.
                self._pending.clear()
                reason = (str(error).splitlines() or [""])[0]
                what = f"{type(error).__name__}: {reason}"
                self.fault = f"reading a step's times failed, later ones may be missing: {what}"

    def flush(self) -> None:
        """Write the steps that wait to share an event."""
        with self._lock:
            self._flush()

    def flush_old(self, now: float) -> None:
        """Write them when no step has come for a while; ``now`` in Unix seconds."""
        with self._lock:
            if self._waiting and now - self._waiting[-1].time > INTERVAL_S:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._written = self._waiting[-1].time
            self._writer.write(merge(self._waiting))
            self._waiting.clear()

    def _record(self, reading: StepReading) -> None:
        clock = self._clock
        sync = synchronisation(reading, clock, self._layout)
        if reading.syncs and sync is not None:
            self._layout = tuple(sync.bucket_bytes or ())
        event = step_event(
            reading, clock, sync, rank=self._rank, synchronised=self._synchronised, wire_ratio=self._wire_ratio
        )
        clock.release(reading.marks[:-1])  # the last one is the first of the next step
        for buckets in reading.syncs:
            clock.release(buckets.marks())
        self.latest = event
        self.longest_s = max(DECAY * self.longest_s, (event.step_ms or 0.0) * 1e-3)
        self._waiting.append(event)
        # The first step is written at once; and a clock that was set back must not hold anything up.
        if not 0.0 <= event.time - self._written < INTERVAL_S:
            self._flush()
