"""Events of measured steps, and merging of those of fast steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from trainer.contract.record import Step
from trainer.telemetry.clocks import Clock, Mark
from trainer.telemetry.collectives.collective_times import CollectiveTimes, collective_times, merged
from trainer.telemetry.collectives.readings import StepCollectives
from trainer.telemetry.comm_hook import Buckets

Phase = Literal["data", "h2d", "forward", "backward", "optimizer", "other", "excluded"]
"""Phase of a step; ``other`` is outside of torch, ``excluded`` counts to nothing."""

WARM_UP = 2
"""Synchronisations whose bucket times are left out: DDP starts with one bucket and rebuilds after the first."""
MEANS = ("loss", "grad_norm", "local_grad_norm")
MEANS_MS = (
    "step_ms", "data_ms", "h2d_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms", "gc_ms", "sync_ms",
    "sync_exposed_ms",
)  # fmt: skip


class SyncTimes(NamedTuple):
    """Gradient synchronisation of one step on this rank."""

    sync_ms: float
    """First bucket launched to all reduced."""
    exposed_ms: float
    """Last bucket ready to all reduced."""
    bucket_bytes: tuple[int, ...]
    stable: bool
    """Whether the warm-up is over, and the buckets are those of the step before."""
    bucket_ms: Sequence[float] | None = None
    """Only on detailed steps."""
    unsent_bytes: int = 0


class StepReading(NamedTuple):
    """Readings of a step that is complete on the host, and perhaps not yet on the device."""

    time: float
    """Unix seconds."""
    step: int
    epoch: int
    samples: int | None
    tokens: int | None
    lr: float | None
    gc_ms: float
    marks: Sequence[Mark]
    """Start of the step, end of each phase, and end of the step."""
    phases: Sequence[Phase]
    """Phase between each mark and the next; the last interval, up to the end of the step, has none."""
    numbers: Callable[[], Sequence[float | None]]
    """Return loss, gradient norm, on detailed steps the local gradient norm, and the gradients' scale, once the marks
    are ready."""
    syncs: Sequence[Buckets]
    """Synchronisations measured by the comm hook: one, or one per backward pass."""
    warm: bool
    """Whether DDP's warm-up is over."""
    clock_set_ms: float | None = None
    """By how much the clock was set since the rank's start; None below a second."""
    collectives: StepCollectives | None = None
    """Collectives other than those of DDP's buckets; None where none are followed."""
    is_local: bool = False
    """Whether DDP reduced nothing in the step, as in ``no_sync()``: nothing of it is in the backward pass."""
    compiled_ns: Sequence[float] = ()
    """Time in torch.compile so far at each mark, nanoseconds; empty if the step has none."""
    steps: int = 1
    """Steps that were seen as one, of which ``step`` is the last."""

    def all_marks(self) -> Iterator[Mark]:
        """Yield all marks, which must be ready before the step's times can be read."""
        yield from self.marks
        for buckets in self.syncs:
            yield from buckets.marks()
        if self.collectives is not None:
            yield from self.collectives.marks()


def joined(first: StepReading, more: StepReading) -> StepReading:
    """Return the readings of a step that went on after its end; what lies between counts to nothing."""
    goes_on = more.marks[0] is first.marks[-1]
    between: list[Phase] = ["other"] if goes_on else ["other", "excluded"]
    phases = [*first.phases, *between]
    compiled: list[float] = []
    if first.compiled_ns or more.compiled_ns:
        compiled += first.compiled_ns or [more.compiled_ns[0]] * len(first.marks)
        compiled += (more.compiled_ns or [compiled[-1]] * len(more.marks))[goes_on:]
    collectives = first.collectives or more.collectives
    if first.collectives is not None and more.collectives is not None:
        for call in more.collectives.calls:
            call.interval += len(phases)
        collectives = StepCollectives(
            more.collectives.groups,
            first.collectives.detailed,
            [*first.collectives.calls, *more.collectives.calls],
            [*first.collectives.waits, *[(w[0], w[1] + len(phases), *w[2:]) for w in more.collectives.waits]],
            [*first.collectives.delays, *[(at + len(phases), delay_s) for at, delay_s in more.collectives.delays]],
        )

    def numbers() -> Sequence[float | None]:
        (loss, grad_norm, _, scale), (added, *_) = first.numbers(), more.numbers()
        return None if loss is None or added is None else loss + added, grad_norm, None, scale

    return first._replace(
        time=more.time,
        samples=None if first.samples is None or more.samples is None else first.samples + more.samples,
        tokens=_total([first.tokens, more.tokens]) if more.tokens is not None else first.tokens,
        gc_ms=first.gc_ms + more.gc_ms,
        marks=[*first.marks, *more.marks[goes_on:]],
        phases=[*phases, *more.phases],
        numbers=numbers,
        syncs=[*first.syncs, *more.syncs],
        collectives=collectives,
        is_local=first.is_local and more.is_local,
        compiled_ns=compiled,
    )


def synchronisation(reading: StepReading, clock: Clock) -> SyncTimes | None:
    """Return the synchronisation of a step whose marks are ready; None where it was not measured."""
    syncs = reading.syncs
    if not syncs:
        return None
    sizes = tuple([size for buckets in syncs for size in buckets.sizes])
    detailed = all(buckets.detailed for buckets in syncs)
    bucket_ms = [ms for buckets in syncs for ms in buckets.bucket_ms(clock)] if detailed else None
    sync_ms = sum([buckets.sync_ms(clock) for buckets in syncs])
    exposed_ms = sum([buckets.exposed_ms(clock) for buckets in syncs])
    stable = reading.warm and all(buckets.stable for buckets in syncs)
    unsent = sum([buckets.unsent_bytes for buckets in syncs])
    return SyncTimes(sync_ms, exposed_ms, sizes, stable, bucket_ms, unsent)


def step_event(
    reading: StepReading,
    clock: Clock,
    sync: SyncTimes | None,
    *,
    rank: int,
    synchronised: bool,
    wire_ratio: float | None,
) -> Step:
    """Return the event of one step, whose marks are ready.

    With ``synchronised`` the ranks exchange gradients; ``wire_ratio`` are the bytes sent per byte of gradient, None
    where they are not known. Durations are rounded to a tenth of a microsecond, finer than any clock here.
    """
    synchronised = synchronised and not (reading.is_local and sync is None)
    loss, grad_norm, local, grad_scale = reading.numbers()
    laps_ms = clock.laps_ms(reading.marks)
    compile_ms = None
    if compiled := reading.compiled_ns:
        # A compilation is no work of the step: its time counts to no phase.
        of_laps = [max(0.0, end - begin) / 1e6 for begin, end in pairwise(compiled)]
        laps_ms = [max(0.0, lap - of_lap) for lap, of_lap in zip(laps_ms, of_laps, strict=True)]
        compile_ms = sum(of_laps)
    phase_ms: dict[str, float] = {}
    for phase, lap_ms in zip(reading.phases, laps_ms, strict=False):
        phase_ms[phase] = phase_ms.get(phase, 0.0) + lap_ms
    excluded_ms = phase_ms.pop("excluded", None)
    step_ms = sum(laps_ms) - (excluded_ms or 0.0)
    phase_ms.pop("other", None)
    other_ms = max(0.0, step_ms - sum(phase_ms.values())) if phase_ms else None
    times = None
    if reading.collectives is not None:
        start = reading.marks[reading.phases[:1] == ["excluded"]]
        times = collective_times(reading.collectives, reading.phases, start, clock)
        for name, exposed_ms in times.exposed_ms.items():
            if name in phase_ms:
                phase_ms[name] = max(0.0, phase_ms[name] - exposed_ms)
        if other_ms is not None:
            other_ms = max(0.0, other_ms - times.exposed_ms.get("other", 0.0))
    backward_ms = phase_ms.get("backward")
    if synchronised and backward_ms is not None:
        backward_ms = max(0.0, backward_ms - sync.exposed_ms) if sync is not None else None
    event = Step(
        time=reading.time,
        rank=rank,
        step=reading.step,
        epoch=reading.epoch,
        steps=1,
        samples=reading.samples,
        tokens=reading.tokens,
        lr=reading.lr,
        loss=loss,
        non_finite=_non_finite(loss=loss, grad_norm=grad_norm),
        clock_set_ms=reading.clock_set_ms,
        grad_norm=grad_norm,
        local_grad_norm=None if local is None else local / (grad_scale or 1.0),
        gc_ms=rounded(reading.gc_ms) if compile_ms is None else None,
        compile_ms=rounded(compile_ms),
        step_ms=rounded(step_ms),
        data_ms=rounded(phase_ms.get("data")),
        h2d_ms=rounded(phase_ms.get("h2d")),
        forward_ms=rounded(phase_ms.get("forward")),
        backward_ms=rounded(backward_ms),
        optimizer_ms=rounded(phase_ms.get("optimizer")),
        other_ms=rounded(other_ms),
        core_wait_ms=_core_wait_ms(reading, clock, synchronised, times) if compile_ms is None else None,
    )
    if sync is not None and sync.stable:
        event.sync_ms, event.sync_exposed_ms = rounded(sync.sync_ms), rounded(sync.exposed_ms)
        event.sync_buckets = len(sync.bucket_bytes)
        event.sync_bytes = (
            None if wire_ratio is None else int((sum(sync.bucket_bytes) - sync.unsent_bytes) * wire_ratio)
        )
        if sync.bucket_ms is not None:
            event.bucket_ms = [round(value, 4) for value in sync.bucket_ms]
    if excluded_ms is not None and times is not None:
        event.evaluation_ms = rounded(max(0.0, excluded_ms - times.excluded_ms))
    if times is not None:
        _add_collectives(event, times, measured=not synchronised or (sync is not None and sync.stable))
    if reading.steps > 1:
        _divide(event, reading.steps)
    return event


def _divide(event: Step, steps: int) -> None:
    """Make means of what an event of several steps has in all, except of its samples and tokens."""
    event.steps, event.bucket_ms = steps, None
    for name in MEANS_MS:
        value = getattr(event, name)
        setattr(event, name, None if value is None else rounded(value / steps))
    if event.sync_bytes is not None:
        event.sync_bytes //= steps
    if event.sync_buckets is not None:
        event.sync_buckets //= steps
    if event.core_wait_ms is not None:
        event.core_wait_ms = {phase: round(waited / steps, 4) for phase, waited in event.core_wait_ms.items()}
    if event.groups is not None:
        event.groups = merged([event.groups, *[None] * (steps - 1)])


def _add_collectives(event: Step, times: CollectiveTimes, *, measured: bool) -> None:
    """Add the collectives of a step; ``measured`` if all other synchronisation in it was measured, or there is none."""
    event.groups, event.calls = times.groups or None, times.calls or None
    if not measured:
        return
    event.sync_exposed_ms = rounded((event.sync_exposed_ms or 0.0) + sum(times.exposed_ms.values()))
    event.sync_ms = rounded((event.sync_ms or 0.0) + times.total_ms)
    if event.sync_bytes is not None or event.sync_buckets is None:
        event.sync_bytes = (event.sync_bytes or 0) + times.bytes


def _non_finite(**numbers: float | None) -> list[str]:
    return [name for name, number in numbers.items() if number is not None and not math.isfinite(number)]


def _core_wait_ms(
    reading: StepReading, clock: Clock, synchronised: bool, times: CollectiveTimes | None
) -> dict[str, float] | None:
    """Return the run delay by phase; None where it is not counted, or not known for the synchronisation."""
    waits_ms = clock.waits_ms(reading.marks)
    if waits_ms is None:
        return None
    by_phase: dict[str, float] = {}
    for phase, waited in zip(reading.phases, waits_ms, strict=False):
        if waited > 0.0 and phase != "excluded":
            by_phase[phase] = by_phase.get(phase, 0.0) + waited
    if synchronised:
        if not reading.syncs or any(buckets.end is None for buckets in reading.syncs):
            return None
        in_sync = sum([(clock.waits_ms([buckets.ready[-1], buckets.end]) or (0.0,))[0] for buckets in reading.syncs])
        if in_sync > 0.0:
            by_phase["sync"] = in_sync
            by_phase["backward"] = by_phase.get("backward", 0.0) - in_sync
    for name, waited in (times.core_wait_ms or {}).items() if times is not None else ():
        by_phase[name] = by_phase.get(name, 0.0) - waited
        by_phase["sync"] = by_phase.get("sync", 0.0) + waited
    return {phase: round(waited, 4) for phase, waited in by_phase.items() if waited > 0.0}


def merge(steps: Sequence[Step]) -> Step:
    """Merge the events of consecutive steps of one rank.

    Means are over the steps that have the value; ``samples`` are the total of those that are known, ``tokens`` a total,
    absent where a step has none; other fields are of the last step. Single losses, step times and exposed
    synchronisations are kept as lists in step order, samples where they differ; a loss there has the seven digits of a
    32-bit float. Collectives are means over all steps.
    """
    last = steps[-1]
    if len(steps) == 1:
        return last
    means: dict[str, float | None] = {name: _mean([getattr(step, name) for step in steps]) for name in MEANS}
    for name in MEANS_MS:
        means[name] = rounded(_mean([getattr(step, name) for step in steps]))
    synced = [step for step in steps if step.sync_exposed_ms is not None]
    event = Step(
        time=last.time,
        rank=last.rank,
        step=last.step,
        epoch=last.epoch,
        lr=last.lr,
        clock_set_ms=last.clock_set_ms,
        steps=len(steps),
        tokens=_total([step.tokens for step in steps]),
        core_wait_ms=_mean_waits([step.core_wait_ms for step in steps if step.core_wait_ms is not None]),
        compile_ms=sum(step.compile_ms or 0.0 for step in steps) or None,
        step_ms_each=[step.step_ms for step in steps],
        non_finite=list(dict.fromkeys(name for step in steps for name in step.non_finite)),
        **means,  # type: ignore[arg-type]
    )
    samples = [step.samples for step in steps]
    if known := [each for each in samples if each is not None]:
        event.samples = sum(known)
    if len({*samples}) > 1:
        event.samples_each = samples
    if event.loss is not None:
        event.losses = [None if step.loss is None else float(f"{step.loss:.7g}") for step in steps]
    if synced:
        event.sync_exposed_ms_each = [step.sync_exposed_ms for step in steps]
        event.sync_bytes, event.sync_buckets = synced[-1].sync_bytes, synced[-1].sync_buckets
        event.bucket_ms = next((step.bucket_ms for step in reversed(synced) if step.bucket_ms is not None), None)
    if any(step.groups for step in steps):
        event.groups = merged([step.groups for step in steps])
        if synced and None not in (sizes := [step.sync_bytes for step in synced]):
            event.sync_bytes = round(sum(filter(None, sizes)) / len(sizes))
        event.calls = next((step.calls for step in reversed(steps) if step.calls), None)
    return event


def _mean_waits(counted: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    if not counted:
        return None
    total: dict[str, float] = {}
    for waits in counted:
        for phase, waited in waits.items():
            total[phase] = total.get(phase, 0.0) + waited
    return {phase: round(waited / len(counted), 4) for phase, waited in total.items()}


def _total(counts: Sequence[int | None]) -> int | None:
    return None if None in counts else sum(filter(None, counts))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def rounded(duration_ms: float | None) -> float | None:
    """Round a duration to a tenth of a microsecond."""
    # ``round`` to so many places goes through a decimal string, which takes three times as long.
    return None if duration_ms is None else int(duration_ms * 1e4 + 0.5) / 1e4
