"""Steps on their way into the record: fast ones are merged, so that the record stays small and none is dropped."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.record import EventWriter, Step

_MEANS = (
    "loss",
    "grad_norm",
    "local_grad_norm",
    "step_ms",
    "data_ms",
    "h2d_ms",
    "forward_ms",
    "backward_ms",
    "optimizer_ms",
    "gc_ms",
    "sync_ms",
    "sync_exposed_ms",
)
_DURATIONS = tuple(name for name in _MEANS if name.endswith("_ms"))
_LATEST = ("sync_bytes", "sync_buckets", "bucket_ms")


def merge(steps: Sequence[Step]) -> Step:
    """Return one event for consecutive steps of one rank.

    Means are taken over the steps that have the value, since one not measured at a step says nothing about it;
    ``samples`` and ``tokens`` are totals; what has no mean is the latest.
    """
    last = steps[-1]
    if len(steps) == 1:
        return last
    merged = Step(
        time=last.time,
        rank=last.rank,
        step=last.step,
        epoch=last.epoch,
        lr=last.lr,
        steps=sum(step.steps for step in steps),
        samples=sum(step.samples for step in steps),
        tokens=None if last.tokens is None else sum(step.tokens or 0 for step in steps),
    )
    for name in _MEANS:
        values = [value for step in steps if (value := getattr(step, name)) is not None]
        if values:
            setattr(merged, name, sum(values) / len(values))
    for name in _LATEST:
        values = [value for step in steps if (value := getattr(step, name)) is not None]
        if values:
            setattr(merged, name, values[-1])
    waits = [step.core_wait_ms for step in steps if step.core_wait_ms is not None]
    if waits:
        parts = dict.fromkeys(part for each in waits for part in each)
        merged.core_wait_ms = {part: sum(each.get(part, 0.0) for each in waits) / len(waits) for part in parts}
    return merged


class StepMerger:
    """Writes each step, or one event for several when they come faster than 20 a second."""

    interval_s = 0.05

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._waiting: list[Step] = []
        self._next_at = 0.0

    def add(self, step: Step) -> None:
        """Take the next step; the first one is written at once, since start latency is measured by it."""
        self._waiting.append(step)
        waits = 0.0 < self._next_at - step.time <= self.interval_s  # else time is up, or was set back
        if not waits:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._next_at = self._waiting[-1].time + self.interval_s
            self._writer.write(rounded(merge(self._waiting)))
            self._waiting.clear()

    def flush_old(self, now: float) -> None:
        """Write what waits when no step has come for a while."""
        if self._waiting and now - self._waiting[-1].time > self.interval_s:
            self.flush()


def rounded(step: Step) -> Step:
    """Round durations to a tenth of a microsecond, beyond which no clock here tells anything."""
    for name in _DURATIONS:
        value = getattr(step, name)
        if value is not None:
            setattr(step, name, round(value, 4))
    if step.bucket_ms is not None:
        step.bucket_ms = [round(value, 4) for value in step.bucket_ms]
    if step.core_wait_ms is not None:
        step.core_wait_ms = {part: round(value, 4) for part, value in step.core_wait_ms.items()}
    return step
