"""Numbers of a step's collectives, from its readings; on the writer's thread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.contract.record.collective_groups import CollectiveCall, GroupSync
from trainer.telemetry.clocks import Clock, HostClock, Mark
from trainer.telemetry.collectives.readings import Call, StepCollectives

MAX_CALLS = 500
"""Single calls of a step that are recorded: the first ones."""
NO_WAIT = (-math.inf, 0.0)
"""Latest end and time of the waits for a call that has none."""


class CollectiveTimes(NamedTuple):
    """Collectives of a step."""

    exposed_ms: Mapping[str, float]
    """By the phases in which the rank was blocked."""
    core_wait_ms: Mapping[str, float] | None
    """Run delay within these, likewise; None where it is not counted."""
    total_ms: float
    """Time in which at least one collective was under way, from its call to the end of the wait for it."""
    bytes: int
    groups: list[GroupSync]
    calls: list[CollectiveCall] | None
    """Single calls; only when detailed."""
    excluded_ms: float = 0.0
    """Time for which the rank was blocked in what counts to no step."""


def collective_times(step: StepCollectives, phases: Sequence[str], start: Mark, clock: Clock) -> CollectiveTimes:
    """Return the numbers of a step whose marks are ready; ``start`` is its first mark."""
    names = [*phases, "other"]
    last_phase = len(phases)
    calls, waits, excluded_ms = step.calls, step.waits, 0.0
    if "excluded" in names:
        calls = [call for call in calls if names[min(call.interval, last_phase)] != "excluded"]
        excluded = [wait for wait in waits if names[min(wait[1], last_phase)] == "excluded"]
        begins_ms = clock.offsets_ms(start, [wait[2] for wait in excluded])
        ends_ms = clock.offsets_ms(start, [wait[3] for wait in excluded])
        excluded_ms = sum(ends_ms) - sum(begins_ms)
        waits = [wait for wait in waits if names[min(wait[1], last_phase)] != "excluded"]
    # One key to all sums of a wait: the training thread, which may have hundreds, cannot run Python meanwhile.
    called = Counter([(call.group, call.operation) for call in calls])
    sizes = [0] * len(step.groups)
    for call in calls:
        sizes[call.group] += call.bytes
    blocked_ms: dict[tuple[int, str, int], float] = {}
    """By group, operation and interval."""
    total_ms: dict[int, float] = {}
    """From the call to the end of the wait, by group."""
    ends: dict[Call, tuple[float, float]] = {}
    begins_ms = clock.offsets_ms(start, [wait[2] for wait in waits])
    ends_ms = clock.offsets_ms(start, [wait[3] for wait in waits])
    calls_ms = clock.offsets_ms(start, [wait[0].start for wait in waits if wait[4]])
    # Backwards in time: what is under way before the end of a wait is known from those that end later.
    covered_ms, reached_ms = 0.0, math.inf
    for (call, interval, _, _, last), begin_ms, end_ms in zip(
        reversed(waits), reversed(begins_ms), reversed(ends_ms), strict=True
    ):
        key = call.group, call.operation, interval
        blocked_ms[key] = blocked_ms.get(key, 0.0) + (end_ms - begin_ms)
        if step.detailed:
            ends[call] = max(end_ms, ends.get(call, NO_WAIT)[0]), ends.get(call, NO_WAIT)[1] + (end_ms - begin_ms)
        if last:
            begin_ms = calls_ms.pop()
            total_ms[call.group] = total_ms.get(call.group, 0.0) + (end_ms - begin_ms)
        if begin_ms < reached_ms:  # what began in an earlier step counts from the start of this one
            under_way_ms = (end_ms if end_ms < reached_ms else reached_ms) - (begin_ms if begin_ms > 0.0 else 0.0)
            if under_way_ms > 0.0:
                covered_ms += under_way_ms
            reached_ms = begin_ms
    exposed_ms = [0.0] * len(names)
    for (_, _, interval), blocked in blocked_ms.items():
        exposed_ms[min(interval, last_phase)] += blocked
    core_wait_ms = None
    if isinstance(clock, HostClock) and clock.counts_waits:
        delayed_s = [0.0] * len(names)
        for interval, delay_s in step.delays:
            delayed_s[min(interval, last_phase)] += delay_s
        core_wait_ms = {name: ms for name, ms in _by_phase(names, delayed_s, 1e3).items() if name != "excluded"}
    return CollectiveTimes(
        _by_phase(names, exposed_ms),
        core_wait_ms,
        covered_ms,
        sum(sizes),
        [
            _group_sync(step.groups[group].name, group, sizes[group], called, blocked_ms, total_ms.get(group))
            for group in dict.fromkeys([*(group for group, _ in called), *(group for group, _, _ in blocked_ms)])
        ],
        [
            _single(call, step, clock.offsets_ms(start, [call.start])[0], *ends.get(call, NO_WAIT))
            for call in calls[:MAX_CALLS]
        ]
        if step.detailed
        else None,
        excluded_ms,
    )


def merged(steps: Sequence[Sequence[GroupSync] | None]) -> list[GroupSync]:
    """Return the means of the groups over all covered steps; a step without a group's collectives counts as none."""
    total: dict[str, GroupSync] = {}
    for sync in [each for groups in steps for each in groups or ()]:
        none = GroupSync(group=sync.group, calls=0.0, operations={}, operation_exposed_ms={})
        known = total.setdefault(sync.group, none)
        known.calls += sync.calls
        known.bytes += sync.bytes
        known.exposed_ms = _plus(known.exposed_ms, sync.exposed_ms)
        known.total_ms = _plus(known.total_ms, sync.total_ms)
        for operation, calls in sync.operations.items():
            known.operations[operation] = known.operations.get(operation, 0.0) + calls
        for operation, exposed_ms in _by_operation(sync).items():
            known.operation_exposed_ms[operation] = known.operation_exposed_ms.get(operation, 0.0) + exposed_ms
    share = 1.0 / len(steps)
    for sync in total.values():
        sync.calls = round(sync.calls * share, 4)
        sync.bytes = round(sync.bytes * share, 1)
        sync.exposed_ms = None if sync.exposed_ms is None else _rounded(sync.exposed_ms * share)
        sync.total_ms = None if sync.total_ms is None else _rounded(sync.total_ms * share)
        sync.operations = {operation: round(calls * share, 4) for operation, calls in sync.operations.items()}
        several = len(sync.operations) > 1
        sync.operation_exposed_ms = (
            {operation: round(ms * share, 4) for operation, ms in sync.operation_exposed_ms.items()} if several else {}
        )
    return list(total.values())


def _by_operation(sync: GroupSync) -> Mapping[str, float]:
    if len(sync.operations) == 1 and sync.exposed_ms is not None:
        return dict.fromkeys(sync.operations, sync.exposed_ms)
    return sync.operation_exposed_ms


def _by_phase(names: Sequence[str], values: Sequence[float], factor: float = 1.0) -> Mapping[str, float]:
    """Return the sums by phase of values of each interval, times a factor, without those that are 0."""
    sums: dict[str, float] = {}
    for name, value in zip(names, values, strict=True):
        if value:
            sums[name] = sums.get(name, 0.0) + value * factor
    return sums


def _group_sync(
    name: str,
    index: int,
    size: int,
    called: Mapping[tuple[int, str], int],
    blocked_ms: Mapping[tuple[int, str, int], float],
    total_ms: float | None,
) -> GroupSync:
    operations: dict[str, float] = {operation: calls for (group, operation), calls in called.items() if group == index}
    exposed_ms: dict[str, float] = {}
    for (group, operation, _), blocked in blocked_ms.items():
        if group == index:
            exposed_ms[operation] = exposed_ms.get(operation, 0.0) + blocked
    return GroupSync(
        group=name,
        calls=sum(operations.values()),
        bytes=size,
        exposed_ms=round(sum(exposed_ms.values()), 4) if exposed_ms else None,
        total_ms=_rounded(total_ms),
        operations=operations,
        operation_exposed_ms={operation: round(ms, 4) for operation, ms in exposed_ms.items()}
        if len(operations.keys() | exposed_ms.keys()) > 1
        else {},
    )


def _single(call: Call, step: StepCollectives, start_ms: float, end_ms: float, exposed_ms: float) -> CollectiveCall:
    """Return a call as far as the step goes: a wait for it may be in a later step."""
    total_ms = max(0.0, end_ms - start_ms)
    return CollectiveCall(
        step.groups[call.group].name,
        call.operation,
        call.bytes,
        round(start_ms, 4),
        round(total_ms, 4),
        round(exposed_ms, 4),
    )


def _plus(known: float | None, more: float | None) -> float | None:
    return known if more is None else (known or 0.0) + more


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
