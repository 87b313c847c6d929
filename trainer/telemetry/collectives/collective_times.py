"""Numbers of a step's collectives, from its readings; on the writer's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.contract.record.collective_groups import CollectiveCall, GroupSync
from trainer.telemetry.clocks import Clock, HostClock, Mark
from trainer.telemetry.collectives.readings import Call, StepCollectives

MAX_CALLS = 500
"""Single calls of a step that are recorded: the first ones."""


class CollectiveTimes(NamedTuple):
    """Collectives of a step."""

    exposed_ms: Mapping[str, float]
    """By the phase in which the rank was blocked."""
    core_wait_ms: Mapping[str, float] | None
    """Run delay within these, likewise; None where it is not counted."""
    total_ms: float
    """Time in which at least one collective was under way, from its call to the end of the wait for it."""
    bytes: int
    groups: list[GroupSync]
    calls: list[CollectiveCall] | None
    """Single calls; only when detailed."""


def collective_times(step: StepCollectives, phases: Sequence[str], start: Mark, clock: Clock) -> CollectiveTimes:
    """Return the numbers of a step whose marks are ready; ``start`` is its first mark."""
    names = [*phases, "other"]
    last_phase = len(phases)
    calls, waits = step.calls, step.waits
    if "excluded" in names:
        calls = [call for call in calls if names[min(call.interval, last_phase)] != "excluded"]
        waits = [wait for wait in waits if names[min(wait[1], last_phase)] != "excluded"]
    by_group: dict[int, GroupSync] = {}
    for call in calls:
        sync = by_group.get(call.group) or _add_group(by_group, call, step)
        sync.calls += 1
        sync.bytes += call.bytes
        operations = sync.operations
        operations[call.operation] = operations.get(call.operation, 0) + 1
    exposed: dict[str, float] = {}
    under_way: list[tuple[float, float]] = []
    ends: dict[Call, tuple[float, float]] = {}
    begins_ms = clock.offsets_ms(start, [wait[2] for wait in waits])
    ends_ms = clock.offsets_ms(start, [wait[3] for wait in waits])
    for (call, interval, _, _, last), begin_ms, end_ms in zip(waits, begins_ms, ends_ms, strict=True):
        name, blocked_ms = names[min(interval, last_phase)], end_ms - begin_ms
        exposed[name] = exposed.get(name, 0.0) + blocked_ms
        sync = by_group.get(call.group) or _add_group(by_group, call, step)
        sync.exposed_ms = (sync.exposed_ms or 0.0) + blocked_ms
        if last:
            begin_ms = clock.elapsed_ms(start, call.start)
            sync.total_ms = (sync.total_ms or 0.0) + end_ms - begin_ms
        under_way.append((begin_ms, end_ms))
        if step.detailed:
            ends[call] = end_ms, ends.get(call, (0.0, 0.0))[1] + blocked_ms
    for sync in by_group.values():
        sync.exposed_ms, sync.total_ms = _rounded(sync.exposed_ms), _rounded(sync.total_ms)
    return CollectiveTimes(
        exposed,
        _delayed_ms([(names[min(wait[1], last_phase)], wait[2], wait[3]) for wait in waits], clock),
        _covered_ms(under_way),
        sum([call.bytes for call in calls]),
        list(by_group.values()),
        [
            _single(call, step, clock.elapsed_ms(start, call.start), *ends.get(call, (None, 0.0)))
            for call in calls[:MAX_CALLS]
        ]
        if step.detailed
        else None,
    )


def merged(steps: Sequence[Sequence[GroupSync] | None]) -> list[GroupSync]:
    """Return the means of the groups over all covered steps; a step without a group's collectives counts as none."""
    total: dict[str, GroupSync] = {}
    for sync in [each for groups in steps for each in groups or ()]:
        known = total.setdefault(sync.group, GroupSync(group=sync.group, calls=0.0, operations={}))
        known.calls += sync.calls
        known.bytes += sync.bytes
        known.exposed_ms = _plus(known.exposed_ms, sync.exposed_ms)
        known.total_ms = _plus(known.total_ms, sync.total_ms)
        for operation, calls in sync.operations.items():
            known.operations[operation] = known.operations.get(operation, 0.0) + calls
    share = 1.0 / len(steps)
    for sync in total.values():
        sync.calls = round(sync.calls * share, 4)
        sync.bytes = round(sync.bytes * share, 1)
        sync.exposed_ms = None if sync.exposed_ms is None else _rounded(sync.exposed_ms * share)
        sync.total_ms = None if sync.total_ms is None else _rounded(sync.total_ms * share)
        sync.operations = {operation: round(calls * share, 4) for operation, calls in sync.operations.items()}
    return list(total.values())


def _delayed_ms(waits: Sequence[tuple[str, Mark, Mark]], clock: Clock) -> Mapping[str, float] | None:
    """Return the run delay within waits, by phase; None where it is not counted."""
    if not isinstance(clock, HostClock) or not clock.counts_waits:
        return None
    delayed: dict[str, float] = {}
    for name, (_, before), (_, after) in waits:
        if after != before:
            delayed[name] = delayed.get(name, 0.0) + (after - before) * 1e3
    return delayed


def _add_group(by_group: dict[int, GroupSync], call: Call, step: StepCollectives) -> GroupSync:
    sync = by_group[call.group] = GroupSync(group=step.groups[call.group].name, calls=0, operations={})
    return sync


def _single(
    call: Call, step: StepCollectives, start_ms: float, end_ms: float | None, exposed_ms: float
) -> CollectiveCall:
    """Return a call as far as the step goes: a wait for it may be in a later step."""
    total_ms = 0.0 if end_ms is None else end_ms - start_ms
    return CollectiveCall(
        step.groups[call.group].name,
        call.operation,
        call.bytes,
        round(start_ms, 4),
        round(total_ms, 4),
        round(exposed_ms, 4),
    )


def _covered_ms(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans of time."""
    covered = reached = 0.0  # what began in an earlier step counts from the start of this one
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _plus(known: float | None, more: float | None) -> float | None:
    return known if more is None else (known or 0.0) + more


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
