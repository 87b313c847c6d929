"""Numbers of a step's collectives: by group and phase, in the event of the step, and merged over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from manual_clock import ManualClock

from trainer.contract.record import EventWriter, Step, decode_events
from trainer.contract.record.collective_groups import CollectiveCall, GroupSync
from trainer.telemetry.clocks import HostClock
from trainer.telemetry.collectives.collective_meter import CollectiveMeter, bytes_of
from trainer.telemetry.collectives.collective_times import collective_times
from trainer.telemetry.collectives.group_names import NamedGroup, name_of
from trainer.telemetry.collectives.readings import Call, StepCollectives
from trainer.telemetry.step_events import Phase, StepReading, SyncTimes, merge, step_event
from trainer.telemetry.step_recorder import StepRecorder

GROUPS = [NamedGroup("dp", [0, 2]), NamedGroup("tp", [0, 1])]
PHASES: list[Phase] = ["forward", "backward", "optimizer"]
BOUNDS_MS = (0, 10, 30, 40, 45)
"""Start of the step, end of each phase, end of the step."""


class Group:
    """Process group."""


def at(ms: float) -> tuple[float, float]:
    return ms / 1e3, 0.0


def step_of(*calls: tuple[int, str, float, list[tuple[float, float]], bool], detailed: bool = False) -> StepCollectives:
    """Return readings of calls: group, operation, start, times of waiting, and whether the last one completes it."""
    step = StepCollectives(GROUPS, detailed)
    for group, operation, start, waits, complete in calls:
        call = Call(group, operation, 100, _interval(start), start / 1e3, start / 1e3)
        step.calls.append(call)
        for begin, end in waits:
            last = complete and (begin, end) == waits[-1]
            step.waits.append((call, _interval(begin), begin / 1e3, end / 1e3, last))
    return step


def _interval(ms: float) -> int:
    return sum(bound <= ms for bound in BOUNDS_MS[1:-1])


def event_of(step: StepCollectives | None, sync: SyncTimes | None = None, **named: Any) -> Any:
    reading = StepReading(
        1.0, 1, 1, 8, None, None, 0.0, [at(ms) for ms in BOUNDS_MS], PHASES,
        lambda: (None, None, None, 1.0), (), True, None, step,
    )  # fmt: skip
    return step_event(reading, HostClock(), sync, rank=0, wire_ratio=1.0, **{"synchronised": False, **named})


def test_waits_leave_their_phases_and_are_the_synchronisation() -> None:
    event = event_of(
        step_of(
            (0, "all_gather", 1, [(1, 1), (2, 5)], True),  # in the call; then 3 ms in the forward pass
            (1, "all_reduce", 12, [(12, 13), (20, 26)], True),
            (0, "reduce_scatter", 27, [(27, 28)], False),  # waited for in the next step
            (1, "barrier", 41, [(41, 44)], True),
        )
    )
    assert (event.forward_ms, event.backward_ms, event.optimizer_ms, event.other_ms) == (7.0, 12.0, 10.0, 2.0)
    assert event.sync_exposed_ms == 14.0
    assert event.forward_ms + event.backward_ms + event.optimizer_ms + event.other_ms + 14.0 == event.step_ms
    assert event.sync_ms == 4.0 + 14.0 + 1.0 + 3.0, "what overlaps counts once"
    assert event.sync_bytes == 400
    assert event.sync_buckets is None
    assert event.groups == [
        GroupSync(
            group="dp", calls=2, bytes=200, exposed_ms=4.0, total_ms=4.0,
            operations={"all_gather": 1, "reduce_scatter": 1},
            operation_exposed_ms={"all_gather": 3.0, "reduce_scatter": 1.0},
        ),
        GroupSync(
            group="tp", calls=2, bytes=200, exposed_ms=10.0, total_ms=17.0,
            operations={"all_reduce": 1, "barrier": 1}, operation_exposed_ms={"all_reduce": 7.0, "barrier": 3.0},
        ),
    ]  # fmt: skip
    assert event.calls is None


def test_the_calls_of_a_slow_step_are_recorded_alone_and_at_most_once_a_second(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson", rank=0)
    recorder = StepRecorder(HostClock(), writer, rank=0)
    now_s = 0.0
    for factor in [1] * 40 + [2, 2] + [1] * 60 + [2]:
        now_s += 0.045 * factor
        marks = [at(ms * factor) for ms in BOUNDS_MS]
        recorder.add(
            StepReading(
                now_s, round(now_s / 0.045), 1, 8, None, None, 0.0, marks, PHASES, lambda: (None, None, None, 1.0),
                (), True, None, step_of((0, "all_gather", 1, [(1, 5)], True)),
            )
        )  # fmt: skip
    recorder.process()
    recorder.flush()
    writer.close()
    steps = [event for event in decode_events((tmp_path / "0.ndjson").read_bytes()) if isinstance(event, Step)]
    slow = [(event.step, event.steps, event.step_ms, len(event.calls)) for event in steps if event.calls]
    assert slow == [(42, 1, 90.0, 1), (106, 1, 90.0, 1)]


def test_what_overlaps_is_under_way_once() -> None:
    event = event_of(step_of((0, "all_reduce", 11, [(20, 25)], True), (0, "all_reduce", 12, [(25, 26)], True)))
    assert (event.sync_ms, event.sync_exposed_ms) == (15.0, 6.0)
    assert event.groups[0].total_ms == 28.0


def test_single_calls_are_those_of_a_detailed_step() -> None:
    step = step_of((0, "all_gather", 1, [(1, 2), (4, 6)], True), (1, "send", 12, [(12, 13)], False), detailed=True)
    assert event_of(step).calls == [
        CollectiveCall("dp", "all_gather", 100, 1.0, 5.0, 3.0),
        CollectiveCall("tp", "send", 100, 12.0, 1.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("sync", "exposed_ms", "backward_ms", "all_bytes"),
    [
        (SyncTimes(4.0, 2.0, (1000,), True), 5.0, 15.0, 1100),
        (SyncTimes(4.0, 2.0, (1000,), False), None, 15.0, None),  # buckets are still being arranged
        (None, None, None, None),
    ],
)
def test_beside_buckets_of_ddp_both_count_where_both_are_known(
    sync: SyncTimes | None, exposed_ms: float | None, backward_ms: float | None, all_bytes: int | None
) -> None:
    event = event_of(step_of((0, "all_reduce", 20, [(20, 23)], True)), sync, synchronised=True)
    assert (event.sync_exposed_ms, event.backward_ms, event.sync_bytes) == (exposed_ms, backward_ms, all_bytes)
    assert event.groups[0].exposed_ms == 3.0


def test_a_step_without_collectives_waited_for_none_and_one_that_follows_none_knows_nothing() -> None:
    waited, unknown = event_of(step_of()), event_of(None)
    assert (waited.sync_exposed_ms, waited.groups, waited.forward_ms) == (0.0, None, 10.0)
    assert (unknown.sync_exposed_ms, unknown.groups, unknown.forward_ms) == (None, None, 10.0)


def test_collectives_of_an_evaluation_count_to_nothing() -> None:
    step = step_of((0, "all_reduce", 12, [(12, 15)], True), (0, "all_reduce", 2, [(2, 3)], True))
    times = collective_times(step, ["forward", "excluded"], at(0), HostClock())
    assert times.exposed_ms == {"forward": pytest.approx(1.0)}
    assert times.excluded_ms == pytest.approx(3.0)
    assert [group.calls for group in times.groups] == [1]


def test_run_delay_within_waits_is_told_apart_from_that_of_the_phases() -> None:
    host, delay = ManualClock(), ManualClock(0.0)
    clock = HostClock(host, lambda: delay.seconds)
    meter = CollectiveMeter()
    meter.names.index = lambda group: 0  # type: ignore[method-assign]
    meter.names.named.append(GROUPS[0])
    meter.attach(clock, lambda: False)
    phases: list[str] = []
    meter.begin_step(phases)
    marks = [clock.mark()]
    for phase, in_phase_ms, in_wait_ms in (("forward", 3.0, 5.0), ("backward", 2.0, 0.5), ("excluded", 0.0, 4.0)):
        host.advance(100.0)
        delay.advance(in_phase_ms)
        call = meter.begin(Group(), "all_reduce", [])
        assert call is not None
        host.advance(100.0)
        delay.advance(in_wait_ms)
        meter.launched(call, None)
        phases.append(phase)
        marks.append(clock.mark())
    step = meter.take()
    assert step is not None
    times = collective_times(step, phases, marks[0], clock)
    assert times.core_wait_ms == pytest.approx({"forward": 5.0, "backward": 0.5})
    assert clock.waits_ms(marks) == pytest.approx([8.0, 2.5, 4.0])


@pytest.mark.parametrize("waits_itself", [False, True])
def test_a_functional_collective_blocks_in_its_call_and_in_the_wait_for_its_tensor(waits_itself: bool) -> None:
    host, tensor = ManualClock(), torch.ones(2)
    clock = HostClock(host)
    meter = CollectiveMeter()
    meter.names.index = lambda group: 0  # type: ignore[method-assign]
    meter.names.named.append(GROUPS[0])
    meter.attach(clock, lambda: False)
    meter.begin_step([])
    start = clock.mark()
    call = meter.open(Group, "all_gather", tensor)
    assert call is not None
    host.advance(3.0)
    if not waits_itself:
        meter.shut(call, tensor)
        host.advance(50.0)
    waited = meter.begin_tensor_wait(tensor)
    assert waited is call
    host.advance(4.0)
    meter.end_wait(call)
    if waits_itself:
        host.advance(2.0)  # it concatenates what it got
        meter.shut(call, tensor)
    step = meter.take()
    assert step is not None
    times = collective_times(step, ["forward"], start, clock)
    assert times.exposed_ms == {"forward": pytest.approx(7.0)}
    assert times.groups[0].total_ms == pytest.approx(9.0 if waits_itself else 57.0)


def test_merged_groups_are_means_over_all_steps() -> None:
    first = event_of(step_of((0, "all_reduce", 1, [(1, 5)], True), (1, "barrier", 12, [(12, 14)], True)))
    event = merge([first, event_of(step_of()), event_of(step_of((0, "all_reduce", 1, [(1, 3)], True)))])
    assert {group.group: (group.calls, group.bytes, group.exposed_ms, group.operations) for group in event.groups} == {
        "dp": (0.6667, 66.7, 2.0, {"all_reduce": 0.6667}),
        "tp": (0.3333, 33.3, 0.6667, {"barrier": 0.3333}),
    }
    assert event.sync_exposed_ms_each == [6.0, 0.0, 2.0]
    assert event.sync_bytes == 100
    assert merge([event_of(None), event_of(None)]).groups is None


def test_waits_of_merged_steps_are_told_apart_by_operation_where_there_are_several() -> None:
    gathered = event_of(step_of((0, "all_gather", 1, [(1, 5)], True)))
    both = event_of(step_of((0, "all_gather", 1, [(1, 3)], True), (0, "barrier", 12, [(12, 13)], True)))
    (dp,) = merge([gathered, both]).groups
    assert (dp.operations, dp.operation_exposed_ms) == (
        {"all_gather": 1.0, "barrier": 0.5},
        {"all_gather": 3.0, "barrier": 0.5},
    )
    assert merge([gathered, gathered]).groups[0].operation_exposed_ms == {}


def test_bytes_of_nested_tensors() -> None:
    four = torch.ones(4)
    assert [bytes_of(each) for each in (four, [four], [[four, four], [four]], [], None)] == [16, 16, 48, 0, 0]
    assert bytes_of(torch.nn.Parameter(four)) == 16
    indices_and_values = 2 * 4 * 8 + 4 * 4
    sparse = torch.eye(4).to_sparse()
    assert [bytes_of(each) for each in (sparse, [sparse], torch.nn.Parameter(sparse))] == [indices_and_values] * 3


@pytest.mark.parametrize(
    ("torch_name", "description", "whole", "name"),
    [
        ("0", "default_pg", True, "world"),
        ("3", "mesh_dp_shard", False, "dp_shard"),
        ("3", "mesh_tp", True, "tp"),
        ("4", "mesh_dim_1", False, "dim_1"),
        ("2", "undefined", False, "group 2"),
        ("2", "undefined", True, "world"),
        ("9f86d081884c7d65", "", False, "group 9f86d0"),
        ("5", "TENSOR_MODEL_PARALLEL_GROUP", False, "TENSOR_MODEL_PARALLEL_GROUP"),
    ],
)
def test_a_group_has_the_name_of_its_mesh_dimension(torch_name: str, description: str, whole: bool, name: str) -> None:
    assert name_of(torch_name, description, whole=whole) == name
