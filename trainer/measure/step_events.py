"""Measured steps on their way into the record: fast ones share an event, so that the record stays small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from trainer.record import EventWriter, Step

Part = Literal["data", "h2d", "forward", "backward", "optimizer", "other"]
"""What a step's time goes into; ``other`` is in ``step_ms`` only."""


class InParts(NamedTuple):
    """What there is to tell of a step that was measured in parts."""

    parts: Sequence[Part]
    """In order."""
    laps_ms: Sequence[float]
    """Of each part; after them one more interval, of no part."""
    local_grad_norm: float | None = None
    core_wait_ms: Mapping[str, float] | None = None
    """By part, and ``sync``; None where nobody counts it."""
    sync_ms: float | None = None
    exposed_ms: float | None = None
    settled: bool = False
    """Whether the synchronisation is one that means something: after the warm-up, with the buckets of the last one."""
    bucket_bytes: Sequence[int] | None = None
    bucket_ms: Sequence[float] | None = None
    """Only at sampled steps."""


class Measured(NamedTuple):
    """One step of one rank, whose times are known."""

    time: float
    step: int
    epoch: int
    samples: int
    tokens: int | None
    lr: float | None
    gc_ms: float
    step_ms: float
    loss: float | None
    grad_norm: float | None
    in_parts: InParts | None = None
    """None where only the step's length was measured."""


Length = tuple[float, int, int, int, int | None, float | None, float, float, float | None, float | None, None]
"""``Measured`` of a step whose length alone was measured, as the plain tuple that the training thread makes of it."""
TIME: Final = 0
STEP_MS: Final = 7
IN_PARTS: Final = 10
"""Where ``time``, ``step_ms`` and ``in_parts`` are in both."""


class StepMerger:
    """Writes each step, or one event for several when they come faster than 20 a second.

    Where not all steps are measured in parts, an event waits until it has one that is, up to ``longest_s``.

    Args:
        writer: Where events go.
        rank: For the events.
        synchronised: Whether the ranks exchange gradients.
        wire_ratio: Bytes sent per byte of gradient; None where it cannot be told.
    """

    interval_s = 0.05
    longest_s = 0.15

    def __init__(
        self, writer: EventWriter, *, rank: int, synchronised: bool = False, wire_ratio: float | None = 1.0
    ) -> None:
        self._writer = writer
        self._rank = rank
        self._synchronised = synchronised
        self._wire_ratio = wire_ratio
        self._waiting: list[Measured | Length] = []
        self._written = -math.inf
        """When the last step was done that is written, in Unix seconds."""
        self._enough_s = self.longest_s
        """When to write what waits, in seconds from then."""

    def add(self, step: Measured | Length) -> None:
        """Take the next step; the first one is written at once, since start latency is measured by it."""
        self._waiting.append(step)
        if step[IN_PARTS] is not None:
            self._enough_s = self.interval_s
        waits = 0.0 <= step[TIME] - self._written < self._enough_s  # else time is up, or was set back
        if not waits:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._written = self._waiting[-1][TIME]
            self._writer.write(
                merge(self._waiting, rank=self._rank, synchronised=self._synchronised, wire_ratio=self._wire_ratio)
            )
            self._waiting.clear()
            self._enough_s = self.longest_s

    def flush_old(self, now: float) -> None:
        """Write what waits when no step has come for a while."""
        if self._waiting and now - self._waiting[-1][TIME] > self.interval_s:
            self.flush()


def merge(steps: Sequence[Measured | Length], *, rank: int, synchronised: bool, wire_ratio: float | None) -> Step:
    """Return one event for consecutive steps of one rank.

    Means are taken over the steps that have the value, since one not measured at a step says nothing about it;
    ``samples`` and ``tokens`` are totals; what has no mean is the latest. Durations are rounded to a tenth of a
    microsecond, beyond which no clock here tells anything.

    Args:
        steps: In order.
        rank: Of all of them.
        synchronised: Whether exposed synchronisation is to be taken out of the backward pass.
        wire_ratio: Bytes sent per byte of gradient; None where it cannot be told.
    """
    _, _, _, samples, tokens, _, gc_ms, lengths_ms, losses, grad_norms, in_parts = zip(*steps, strict=True)
    time, number, epoch, _, _, lr, *_ = steps[-1]
    event = Step(
        time=time,
        rank=rank,
        step=number,
        epoch=epoch,
        lr=lr,
        steps=len(steps),
        samples=sum(samples),
        tokens=None if tokens[-1] is None else sum([count or 0 for count in tokens]),
        loss=_mean(losses),
        grad_norm=_mean(grad_norms),
        gc_ms=_mean_ms(gc_ms),
        step_ms=_mean_ms(lengths_ms),
    )
    if known := [each for each in in_parts if each is not None]:
        if len(known) < len(steps):
            of_known = [ms for ms, parts in zip(lengths_ms, in_parts, strict=True) if parts is not None]
            event.parts_step_ms = _mean_ms(of_known)
        _tell_parts(event, known, synchronised)
        _tell_synchronisation(event, [each for each in known if each.settled], wire_ratio)
    return event


def _tell_parts(event: Step, steps: Sequence[InParts], synchronised: bool) -> None:
    parts_ms = _means_by_part(steps)
    event.data_ms = _rounded(parts_ms.get("data"))
    event.h2d_ms = _rounded(parts_ms.get("h2d"))
    event.forward_ms = _rounded(parts_ms.get("forward"))
    event.optimizer_ms = _rounded(parts_ms.get("optimizer"))
    backward_ms = parts_ms.get("backward")
    event.backward_ms = _rounded(_without_exposed(steps, backward_ms) if synchronised else backward_ms)
    event.local_grad_norm = _mean([step.local_grad_norm for step in steps])
    event.core_wait_ms = _core_wait_ms(steps)


def _tell_synchronisation(event: Step, settled: Sequence[InParts], wire_ratio: float | None) -> None:
    if not settled:
        return
    event.sync_ms = _mean_ms([step.sync_ms for step in settled])
    event.sync_exposed_ms = _mean_ms([step.exposed_ms for step in settled])
    if sizes := settled[-1].bucket_bytes:
        event.sync_buckets = len(sizes)
        event.sync_bytes = None if wire_ratio is None else int(sum(sizes) * wire_ratio)
    for step in settled:
        if step.bucket_ms is not None:
            event.bucket_ms = [round(value, 4) for value in step.bucket_ms]


def _means_by_part(steps: Sequence[InParts]) -> dict[Part, float]:
    """Return the mean of each part over the steps that have it, ms."""
    total: dict[Part, float] = {}
    count: dict[Part, int] = {}
    for step in steps:
        parts = step.parts
        for part, value in zip(parts, step.laps_ms, strict=False):
            total[part] = total.get(part, 0.0) + value
        for part in dict.fromkeys(parts):
            count[part] = count.get(part, 0) + 1
    return {part: value / count[part] for part, value in total.items()}


def _without_exposed(steps: Sequence[InParts], mean_ms: float | None) -> float | None:
    """Return the mean backward pass without the exposed synchronisation, over the steps where that is known."""
    known = [step for step in steps if step.exposed_ms is not None]
    if mean_ms is None or not known:
        return None
    if len(known) < len(steps):
        mean_ms = _means_by_part(known).get("backward", 0.0)
    return max(0.0, mean_ms - sum([step.exposed_ms or 0.0 for step in known]) / len(known))


def _core_wait_ms(steps: Sequence[InParts]) -> dict[str, float] | None:
    counted = [step.core_wait_ms for step in steps if step.core_wait_ms is not None]
    if not counted:
        return None
    total: dict[str, float] = {}
    for waits in counted:
        for part, value in waits.items():
            total[part] = total.get(part, 0.0) + value
    return {part: round(value / len(counted), 4) for part, value in total.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None] if None in values else values
    return sum(known) / len(known) if known else None  # type: ignore[arg-type]


def _mean_ms(values: Sequence[float | None]) -> float | None:
    return _rounded(_mean(values))


def _rounded(duration_ms: float | None) -> float | None:
    # ``round`` to so many places goes through a decimal string, which takes three times as long.
    return None if duration_ms is None else int(duration_ms * 1e4 + 0.5) / 1e4
