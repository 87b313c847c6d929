"""Numbers of a step's collectives, from its readings; on the writer's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.contract.record.collective_groups import CollectiveCall, GroupSync
from trainer.telemetry.clocks import Clock, Mark
from trainer.telemetry.collectives.collective_meter import Call, StepCollectives

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
    waits = [wait for wait in step.waits if _phase(phases, wait.interval) != "excluded"]
    calls = [call for call in step.calls if _phase(phases, call.interval) != "excluded"]
    exposed: dict[str, float] = {}
    delayed: dict[str, float] | None = {}
    by_group: dict[int, GroupSync] = {}
    for call in calls:
        sync = _group(by_group, call, step)
        sync.calls += 1
        sync.bytes += call.bytes
        sync.operations[call.operation] = sync.operations.get(call.operation, 0) + 1
    under_way: list[tuple[float, float]] = []
    for wait in waits:
        phase = _phase(phases, wait.interval)
        blocked_ms = clock.elapsed_ms(wait.start, wait.end)
        exposed[phase] = exposed.get(phase, 0.0) + blocked_ms
        core_ms = clock.waits_ms((wait.start, wait.end))
        if core_ms is None or delayed is None:
            delayed = None
        else:
            delayed[phase] = delayed.get(phase, 0.0) + core_ms[0]
        sync = _group(by_group, wait.call, step)
        sync.exposed_ms = (sync.exposed_ms or 0.0) + blocked_ms
        if wait.last:
            begin, end = clock.elapsed_ms(start, wait.call.start), clock.elapsed_ms(start, wait.end)
            sync.total_ms = (sync.total_ms or 0.0) + end - begin
            under_way.append((max(0.0, begin), end))
        else:
            begin = clock.elapsed_ms(start, wait.start)
            under_way.append((begin, begin + blocked_ms))
    for sync in by_group.values():
        sync.exposed_ms, sync.total_ms = _rounded(sync.exposed_ms), _rounded(sync.total_ms)
    return CollectiveTimes(
        exposed,
        delayed,
        _covered_ms(under_way),
        sum([call.bytes for call in calls]),
        list(by_group.values()),
        _single_calls(calls[:MAX_CALLS], step, start, clock) if step.detailed else None,
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


def _phase(phases: Sequence[str], interval: int) -> str:
    return phases[interval] if interval < len(phases) else "other"


def _group(by_group: dict[int, GroupSync], call: Call, step: StepCollectives) -> GroupSync:
    sync = by_group.get(call.group)
    if sync is None:
        sync = by_group[call.group] = GroupSync(group=step.groups[call.group].name, calls=0, operations={})
    return sync


def _single_calls(calls: Sequence[Call], step: StepCollectives, start: Mark, clock: Clock) -> list[CollectiveCall]:
    """Return the calls as far as the step goes: a wait for one may be in a later step."""
    ends: dict[Call, Mark] = {}
    exposed: dict[Call, float] = {}
    for wait in step.waits:
        ends[wait.call] = wait.end
        exposed[wait.call] = exposed.get(wait.call, 0.0) + clock.elapsed_ms(wait.start, wait.end)
    return [
        CollectiveCall(
            step.groups[call.group].name,
            call.operation,
            call.bytes,
            round(clock.elapsed_ms(start, call.start), 4),
            round(clock.elapsed_ms(call.start, ends.get(call, call.start)), 4),
            round(exposed.get(call, 0.0), 4),
        )
        for call in calls
    ]


def _covered_ms(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans of time."""
    covered = reached = 0.0
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _plus(known: float | None, more: float | None) -> float | None:
    return known if more is None else (known or 0.0) + more


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
