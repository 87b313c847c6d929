"""Conversion of step readings into events, on the writer's thread, once the device has done the step.

In the training thread, between two steps, the same work would run with cold caches and take several times as long.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from trainer.contract.record import CollectiveGroup, EventWriter, Step
from trainer.telemetry.clocks import Clock
from trainer.telemetry.collectives.group_names import NamedGroup
from trainer.telemetry.step_events import StepReading, merge, step_event, synchronisation

MERGE_INTERVAL_S = 0.05
"""Steps that end within this time share an event, which bounds the record to some 20 events a second."""


class StepRecorder:
    """Queue of step readings that the device has not reached yet, and writer of their events; thread-safe."""

    def __init__(
        self,
        clock: Clock,
        writer: EventWriter,
        *,
        rank: int,
        synchronised: bool = False,
        wire_ratio: float | None = 1.0,
        keeps: bool = False,
    ) -> None:
        """Take readings from here on; with ``keeps`` each step is kept for ``take_kept`` too."""
        self.longest_s = 0.0
        """The longest recent step."""
        self.fault: str | None = None
        """Why later steps may be missing; None without a fault."""
        self._clock = clock
        self._writer = writer
        self._rank = rank
        self.synchronised = synchronised
        """Whether the ranks exchange gradients."""
        self._wire_ratio = wire_ratio
        self._pending: deque[StepReading] = deque()
        self.add: Callable[[StepReading], None] = self._pending.append
        """Queue the readings of a step; called between two steps."""
        self._groups_written = 0
        """Process groups of which the record knows, in the order of ``StepCollectives.groups``."""
        self._unmerged: list[Step] = []
        """Complete steps that may share an event with later ones."""
        self._has_sync = False
        """Whether a synchronisation was measured: in the first steps it is not."""
        self._last_written_s = -math.inf
        """End of the last step that is written, in Unix seconds."""
        self._last_ms: deque[float] = deque(maxlen=32)
        """Durations of the last steps with collectives."""
        self._slow_s = -math.inf
        """End of the last slow step whose calls are written, in Unix seconds."""
        self._kept: deque[Step] = deque(maxlen=1000)  # a script may ask for its shares once only
        self.keeps = keeps
        """Whether the steps are kept for ``take_kept``."""
        self._lock = threading.Lock()
        """Guards everything but ``_pending``."""

    @property
    def idle(self) -> bool:
        return not self._pending

    def process(self, *, other_thread: bool = False) -> None:
        """Turn the steps that are complete on the device into events, in order."""
        with self._lock:
            try:
                if other_thread:
                    self._clock.enter_thread()
                while self._pending and self._clock.ready(self._pending[0].all_marks()):
                    self._record(self._pending.popleft())
            except Exception as error:  # noqa: BLE001 - see below
                # A failed device raises in the next call to it, which may be here. Neither that nor a defect here may
                # end the writer's thread, which still has to record the failure, or hide the script's own exception
                # when it closes its meter.
                self._pending.clear()
                reason = (str(error).splitlines() or [""])[0]
                cause = f"{type(error).__name__}: {reason}"
                self.fault = f"reading a step's times failed, later ones may be missing: {cause}"

    def take_kept(self) -> list[Step]:
        """Return the steps since the last call, each by itself."""
        with self._lock:
            kept = list(self._kept)
            self._kept.clear()
            return kept

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def flush_old(self, now: float) -> None:
        """Write these steps if the last one is older than ``MERGE_INTERVAL_S``; ``now`` in Unix seconds."""
        with self._lock:
            if self._unmerged and now - self._unmerged[-1].time > MERGE_INTERVAL_S:
                self._flush()

    def _flush(self) -> None:
        if self._unmerged:
            self._last_written_s = self._unmerged[-1].time
            event = merge(self._unmerged)
            event.memory_peak_bytes = self._clock.memory_peak_bytes()
            self._writer.write(event)
            self._unmerged.clear()

    def _record(self, reading: StepReading) -> None:
        clock = self._clock
        is_slow = self._is_slow(reading)
        if is_slow and reading.collectives is not None:
            reading.collectives.detailed = True
            self._flush()
        sync = synchronisation(reading, clock)
        event = step_event(
            reading, clock, sync, rank=self._rank, synchronised=self.synchronised, wire_ratio=self._wire_ratio
        )
        if reading.collectives is not None:
            self._write_groups(reading.collectives.groups, reading.time)
            clock.release(reading.collectives.spent_marks())
        clock.release(reading.marks[:-1])  # the last one is the first of the next step
        for buckets in reading.syncs:
            clock.release(buckets.marks())
        longest_decay = 0.9  # factor by which the longest recent step shrinks with each further step
        self.longest_s = max(longest_decay * self.longest_s, (event.step_ms or 0.0) * 1e-3)
        if event.sync_exposed_ms is not None and not self._has_sync:
            # An event of steps with and without a measured synchronisation has phases that do not add up to its steps.
            self._has_sync = True
            self._flush()
        alone = event.steps > 1 or event.evaluation_ms is not None  # the same step on all ranks
        if alone:
            self._flush()
        self._unmerged.append(event)
        if self.keeps:
            self._kept.append(event)
        # The first step is written at once; and a clock that was set back must not delay events.
        if is_slow or alone or not 0.0 <= event.time - self._last_written_s < MERGE_INTERVAL_S:
            self._flush()

    def _is_slow(self, reading: StepReading) -> bool:
        """Return whether a step took so much longer than those before that its single calls are recorded, too."""
        if reading.collectives is None or "excluded" in reading.phases:
            return False
        slow_ratio, interval_s = 1.5, 1.0  # to the median; between two such steps, since a call takes 60 bytes
        step_ms, known = self._clock.elapsed_ms(reading.marks[0], reading.marks[-1]), self._last_ms
        is_slow = len(known) == known.maxlen and step_ms > slow_ratio * median(known)
        known.append(step_ms)
        if not is_slow or 0.0 <= reading.time - self._slow_s < interval_s:
            return False
        self._slow_s = reading.time
        return True

    def _write_groups(self, groups: Sequence[NamedGroup], time: float) -> None:
        """Write the process groups that are new, before a step that has collectives of them."""
        while self._groups_written < len(groups):
            group = groups[self._groups_written]
            self._writer.write(
                CollectiveGroup(
                    time=time, rank=self._rank, name=group.name, ranks=list(group.ranks), backend=group.backend
                )
            )
            self._groups_written += 1
