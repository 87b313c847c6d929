from __future__ import annotations

import gc
import itertools
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import HostWaits
from manual_clock import ManualClock
from torch import nn

from gputrain_tui.state.totals import ZERO_TOTALS
from trainer.contract.record import (
    Doing,
    EventWriter,
    Failure,
    Step,
    decode_events,
    encode_event,
    single_steps,
)
from trainer.host.cores import core_waits
from trainer.telemetry.clocks import CudaClock, HostClock
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.collectives.group_names import NamedGroup
from trainer.telemetry.collectives.readings import Call
from trainer.telemetry.comm_hook import Buckets, factor
from trainer.telemetry.step_events import StepReading, SyncTimes, merge, step_event
from trainer.telemetry.step_meter import StepMeter
from trainer.telemetry.step_recorder import StepRecorder

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------- pure parts


def _step(step: int, **fields: Any) -> Step:
    return Step(**({"time": float(step), "rank": 0, "epoch": 1, "steps": 1, "samples": 8} | {"step": step} | fields))


def test_merged_steps_have_totals_means_of_the_measurements_and_the_single_values() -> None:
    sync = {"sync_ms": 3.0, "sync_exposed_ms": 1.0, "sync_bytes": 4, "sync_buckets": 2, "bucket_ms": [1.0, 2.0]}
    merged = merge(
        [
            _step(4, tokens=10, loss=2.0, step_ms=10.0, lr=0.1),
            _step(5, tokens=20, loss=4.0, step_ms=20.0, lr=0.2, **sync),
            _step(6, tokens=30, loss=6.0, step_ms=30.0, lr=0.3, epoch=2, gc_ms=0.6, forward_ms=9.0),
        ]
    )
    assert (merged.step, merged.epoch, merged.steps, merged.samples, merged.tokens) == (6, 2, 3, 24, 60)
    assert (merged.loss, merged.step_ms, merged.lr, merged.time) == (4.0, 20.0, 0.3, 6.0)
    assert (merged.losses, merged.step_ms_each) == ([2.0, 4.0, 6.0], [10.0, 20.0, 30.0])
    assert merged.sync_exposed_ms_each == [None, 1.0, None]
    assert (merged.sync_ms, merged.sync_exposed_ms, merged.bucket_ms) == (3.0, 1.0, [1.0, 2.0]), "measured once"
    assert (merged.sync_bytes, merged.sync_buckets) == (4, 2)
    assert (merged.gc_ms, merged.forward_ms) == (0.6, 9.0), "where it was measured"
    assert (merged.data_ms, merged.grad_norm) == (None, None), "never measured"


def test_one_step_is_its_own_event_without_lists() -> None:
    step = _step(4, loss=2.0, step_ms=10.0, sync_exposed_ms=1.0)
    assert merge([step]) is step
    assert step.losses is step.step_ms_each is step.sync_exposed_ms_each is None


def test_waits_for_a_core_are_means_over_the_steps_that_counted_them() -> None:
    merged = merge([_step(1, core_wait_ms={"forward": 0.5}), _step(2, core_wait_ms={}), _step(3)])
    assert merged.core_wait_ms == {"forward": 0.25}


def test_an_event_of_several_steps_gives_each_of_them_back() -> None:
    steps = [
        _step(4, time=10.0, loss=2.0, step_ms=500.0, sync_exposed_ms=1.0),
        _step(5, time=10.5, loss=None, step_ms=500.0),
        _step(6, time=11.0, loss=math.nan, step_ms=500.0, sync_exposed_ms=3.0),
    ]
    (read,) = decode_events(encode_event(merge(steps)))
    assert isinstance(read, Step)
    singles = single_steps(read)
    assert [(each.step, each.time, each.steps, each.samples) for each in singles] == [
        (4, 10.0, 1, 8),
        (5, 10.5, 1, 8),
        (6, 11.0, 1, 8),
    ]
    assert [each.loss for each in singles] == [2.0, None, None], "what is no number is none in JSON"
    assert [each.sync_exposed_ms for each in singles] == [1.0, None, 3.0]
    assert single_steps(steps[0]) == [steps[0]]


def _reading(step: int, **fields: Any) -> StepReading:
    base: dict[str, Any] = {
        "time": float(step), "step": step, "epoch": 1, "samples": 8, "tokens": None, "lr": None, "gc_ms": 0.0,
        "marks": [(0.0, 0.0), (0.001, 0.0)], "phases": [], "numbers": lambda: (None, None, None, 1.0),
        "syncs": (), "warm": True,
    }  # fmt: skip
    return StepReading(**(base | fields))


def _event(reading: StepReading, sync: SyncTimes | None = None, *, synchronised: bool = False) -> Step:
    return step_event(reading, HostClock(), sync, rank=0, synchronised=synchronised, wire_ratio=0.5)


def test_phases_add_up_within_a_step() -> None:
    event = _event(
        _reading(
            1,
            phases=["forward", "backward", "forward", "backward", "data"],
            marks=[(ms / 1e3, 0.0) for ms in (0, 3, 7, 9, 13, 20, 20.5)],
        )
    )
    assert (event.forward_ms, event.backward_ms, event.data_ms, event.step_ms) == (5.0, 8.0, 7.0, 20.5)


def test_steps_that_were_seen_as_one_share_its_time_and_bytes() -> None:
    marks = [(ms / 1e3, 0.0) for ms in (0, 3, 7, 8)]
    sync = SyncTimes(sync_ms=3.0, exposed_ms=2.0, bucket_bytes=(400, 400), stable=True)
    event = _event(_reading(6, steps=2, samples=16, phases=["forward", "backward"], marks=marks), sync)
    assert (event.step, event.steps, event.samples, event.step_ms, event.forward_ms) == (6, 2, 16, 4.0, 1.5)
    assert (event.sync_exposed_ms, event.sync_bytes, event.sync_buckets) == (1.0, 200, 1)


def test_a_compilation_is_in_no_duration_of_its_step_and_in_the_total_of_merged_ones() -> None:
    event = _event(
        _reading(
            1,
            phases=["data", "excluded", "forward", "backward"],
            marks=[(s, 0.0) for s in (0.0, 0.001, 30.001, 32.006, 33.013, 33.014)],
            compiled_ns=[5e9, 5e9, 34e9, 36e9, 37e9, 37e9],
            gc_ms=400.0,
        )
    )
    assert (event.data_ms, event.forward_ms, event.backward_ms) == (1.0, 5.0, 7.0)
    assert (event.compile_ms, event.step_ms, event.other_ms) == (32_000.0, 14.0, 1.0)
    assert (event.gc_ms, event.core_wait_ms) == (None, None), "most of these are of the compilation"
    later = _step(2, step_ms=16.0, compile_ms=500.0)
    assert merge([event, later, _step(3, step_ms=15.0)]).compile_ms == 32_500.0
    assert merge([_step(3, step_ms=15.0), _step(4, step_ms=15.0)]).compile_ms is None


def test_the_exposed_synchronisation_is_taken_out_of_the_backward_pass_where_it_is_known() -> None:
    reading = _reading(1, phases=["backward"], marks=[(0.0, 0.0), (0.01, 0.0), (0.01, 0.0)])
    sync = SyncTimes(sync_ms=5.0, exposed_ms=4.0, bucket_bytes=(6, 2), stable=True, bucket_ms=(1.0, 2.0))
    event = _event(reading, sync, synchronised=True)
    assert (event.backward_ms, event.sync_ms, event.sync_exposed_ms) == (6.0, 5.0, 4.0)
    assert (event.sync_bytes, event.sync_buckets, event.bucket_ms) == (4, 2, [1.0, 2.0]), "half of each byte is sent"
    unstable = _event(reading, sync._replace(stable=False), synchronised=True)
    assert (unstable.backward_ms, unstable.sync_exposed_ms) == (6.0, None)
    assert _event(reading, None, synchronised=True).backward_ms is None, "nobody knows how much was synchronisation"
    assert _event(reading, None, synchronised=False).backward_ms == 10.0


def _events(folder: Path, rank: int = 0) -> list[Any]:
    return list(decode_events((folder / f"{rank}.ndjson").read_bytes()))


def test_fast_steps_share_events_and_none_is_dropped(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    recorder = StepRecorder(HostClock(), writer, rank=0)
    for step in range(1, 101):
        recorder.add(_reading(step, time=1000 + step * 0.01))
    recorder.process()
    recorder.flush()
    writer.close()
    events = _events(tmp_path)
    assert events[0].steps == 1, "the first step is visible at once"
    assert len(events) <= 22
    assert [each.step for event in events for each in single_steps(event)] == list(range(1, 101))


def test_slow_steps_have_an_event_each_and_a_clock_set_back_holds_nothing_up(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    recorder = StepRecorder(HostClock(), writer, rank=0)
    for step, moment in enumerate([1000.0, 1000.06, 1000.12, 400.0, 400.06], start=1):
        recorder.add(_reading(step, time=moment))
    recorder.process()
    writer.close()
    assert [event.steps for event in _events(tmp_path)] == [1, 1, 1, 1, 1]


def test_steps_before_the_first_measured_synchronisation_share_no_event_with_later_ones(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    recorder = StepRecorder(HostClock(), writer, rank=0, synchronised=True)
    for step in range(1, 9):
        sync = Buckets(detailed=False, stable=True, ready=[(0.0018, 0.0)], sizes=[4], end=(0.002, 0.0))
        recorder.add(_reading(step, time=1000 + step * 0.001, syncs=[sync], warm=step > 3,
                              phases=["forward", "backward"],
                              marks=[(ms / 1e3, 0.0) for ms in (0, 1, 2, 3)]))  # fmt: skip
    recorder.process()
    recorder.flush()
    writer.close()
    events = _events(tmp_path)
    assert [event.steps for event in events] == [1, 2, 5]
    assert [event.sync_exposed_ms for event in events] == [None, None, 0.2]
    totals = ZERO_TOTALS
    for event in events:
        totals = totals.plus(event)
    assert (totals.whole_steps, totals.share("sync")) == (5, pytest.approx(0.2 / 3))


def _wait_for_events(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(_events(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------- one rank


def _meter(folder: Path, clock: ManualClock, model: nn.Module | None = None) -> tuple[StepMeter, EventWriter]:
    writer = EventWriter(folder / "0.ndjson")
    model = model or nn.Linear(2, 2)
    return StepMeter(model, device=CPU, writer=writer, rank=0, now=lambda: 1000 + clock() * 100, clock=clock), writer


def test_a_step_runs_from_the_end_of_the_last_and_micro_steps_add_up(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    meter, writer = _meter(tmp_path, clock)
    meter.start()
    for step in (1, 2):
        for _ in range(2):
            for part, milliseconds in (("data", 1), ("h2d", 2), ("forward", 4), ("backward", 8)):
                clock.advance(milliseconds)
                meter.lap(part)
        clock.advance(16)
        meter.lap("optimizer")
        clock.advance(5)
        meter.end(step=step, epoch=1, loss=torch.tensor(0.5), samples=4, tokens=40, lr=0.1, grad_norm=2.0)
        clock.advance(100)  # a validation
        meter.pause()
        meter.start()
    meter.close()
    writer.close()
    for event in _events(tmp_path):
        parts = (event.data_ms, event.h2d_ms, event.forward_ms, event.backward_ms, event.optimizer_ms, event.step_ms)
        assert parts == pytest.approx((2, 4, 8, 16, 16, 51))
        assert event.other_ms == pytest.approx(5)
        assert (event.loss, event.grad_norm, event.samples, event.tokens, event.lr) == (0.5, 2.0, 4, 40, 0.1)
        assert event.gc_ms == 0.0
        assert event.sync_ms is event.sync_exposed_ms is event.sync_bytes is event.local_grad_norm is None


def test_time_between_two_steps_counts_to_the_next_one(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    meter, writer = _meter(tmp_path, clock)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    clock.advance(7)
    meter.end(step=2, epoch=1, samples=1)
    meter.close()
    writer.close()
    assert [event.step_ms for event in _events(tmp_path)] == pytest.approx([0.0, 7.0])


def test_the_first_step_and_the_last_are_written_without_waiting_for_more(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    meter, writer = _meter(tmp_path, clock)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    _wait_for_events(tmp_path, 1)
    assert [event.step for event in _events(tmp_path)] == [1]
    meter.end(step=2, epoch=1, samples=1)
    meter.end(step=3, epoch=1, samples=1)
    meter.close()
    writer.close()
    assert [(event.step, event.steps) for event in _events(tmp_path)] == [(1, 1), (3, 2)]


def test_steps_held_back_are_written_when_no_more_come(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    meter = StepMeter(nn.Linear(2, 2), device=CPU, writer=writer, rank=0)
    meter.start()
    for step in (1, 2, 3):
        meter.end(step=step, epoch=1, samples=1)
    deadline = time.monotonic() + 10
    while [event.step for event in _events(tmp_path)][-1:] != [3] and time.monotonic() < deadline:
        time.sleep(0.005)  # and no further step, pause or end: a hang
    assert sum(event.steps for event in _events(tmp_path)) == 3
    meter.close()
    writer.close()


def test_closing_the_writer_writes_steps_of_a_meter_that_was_not_closed(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    meter = StepMeter(nn.Linear(2, 2), device=CPU, writer=writer, rank=0)
    meter.start()
    for step in (1, 2, 3):
        meter.end(step=step, epoch=1, samples=1)
    writer.close()  # as after an exception
    assert sum(event.steps for event in _events(tmp_path)) == 3
    meter.close()


def test_a_stuck_step_reports_its_phase_once(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    meter, writer = _meter(tmp_path, clock)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    meter.lap("data")
    meter.lap("h2d")
    deadline = time.monotonic() + 10
    while not (found := _doing(tmp_path)) and time.monotonic() < deadline:
        clock.advance(1000)
        time.sleep(0.005)  # and no further call: a hang
    meter.lap("forward")
    meter.pause()
    clock.advance(60_000)  # a validation
    assert writer.flush()
    meter.close()
    writer.close()
    assert [(event.step, event.part, event.parts_done) for event in found] == [(2, "forward", 2)]
    assert len(_doing(tmp_path)) == 1


def test_a_step_stuck_in_a_collective_of_the_script_waits_for_others(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    meter, writer = _meter(tmp_path, clock)
    collectives = CollectiveMeter()
    meter.follow_collectives(collectives, lambda: False)
    meter.start()
    meter.lap("forward")
    group = NamedGroup("tp", [0, 1])
    collectives.names.named.append(group)
    collectives.blocked = Call(0, "all_gather", 0, 1, (0.0, 0.0), (0.0, 0.0))
    deadline = time.monotonic() + 10
    while not (found := _doing(tmp_path)) and time.monotonic() < deadline:
        clock.advance(1000)
        time.sleep(0.005)  # and no further call: a hang
    meter.close()
    writer.close()
    assert [(event.part, event.parts_done, event.waits_in) for event in found] == [("sync", 2, "all_gather of tp")]


def _doing(folder: Path) -> list[Doing]:
    return [event for event in decode_events((folder / "0.ndjson").read_bytes()) if isinstance(event, Doing)]


def test_waits_for_a_core_are_recorded_per_phase_and_rounded() -> None:
    manual, waited = ManualClock(0.0), ManualClock(0.0)
    clock = HostClock(manual, waited)
    marks, phases = [clock.mark()], ["data", "forward", "backward", "optimizer"]
    for milliseconds in (0.0, 3.0, 5.123456, 1.0):
        manual.advance(10)
        waited.advance(milliseconds)
        marks.append(clock.mark())
    waited.advance(70.0)
    marks.append(clock.mark(waits=False))
    event = step_event(
        _reading(1, marks=marks, phases=phases), clock, None, rank=0, synchronised=False, wire_ratio=None
    )
    assert event.core_wait_ms == {"forward": 3.0, "backward": 5.1235, "optimizer": 1.0}


def test_a_wait_after_a_mark_that_did_not_read_it_counts_to_the_next_phase() -> None:
    manual, waited = ManualClock(0.0), ManualClock(0.0)
    clock = HostClock(manual, waited)
    marks = [clock.mark()]
    waited.advance(2.0)
    marks.append(clock.mark(waits=False))
    waited.advance(1.0)
    manual.advance(5.0)
    marks.append(clock.mark())
    assert clock.waits_ms(marks) == pytest.approx([0.0, 3.0])


def test_waits_for_a_core_are_read_in_a_five_hundredth_of_the_time() -> None:
    manual, waited = ManualClock(0.0), ManualClock(0.0)

    def read() -> float:
        manual.advance(0.01)
        return waited()

    clock = HostClock(manual, read)
    marks = [clock.mark()]
    for elapsed_ms, waited_ms in ((4.9, 0.3), (0.2, 1.1), (4.9, 2.0), (5.0, 4.0)):
        manual.advance(elapsed_ms)
        waited.advance(waited_ms)
        marks.append(clock.mark())
    assert clock.waits_ms(marks) == pytest.approx([0.0, 1.4, 0.0, 6.0])


def test_waits_for_a_core_are_absent_where_the_system_does_not_count_them() -> None:
    clock = HostClock()
    assert clock.waits_ms([clock.mark(), clock.mark()]) is None
    assert _event(_reading(1)).core_wait_ms is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waits for a core")
def test_the_kernel_counts_this_threads_waits_for_a_core() -> None:
    waits = core_waits()
    assert waits is not None
    before = waits()
    assert 0.0 <= before <= waits()


def test_garbage_collection_within_a_step_is_timed(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    callbacks = list(gc.callbacks)
    meter = StepMeter(nn.Linear(2, 2), device=CPU, writer=writer, rank=0)
    meter.start()
    gc.collect()
    meter.end(step=1, epoch=1, samples=1)
    meter.close()
    writer.close()
    (event,) = _events(tmp_path)
    assert 0.0 < event.gc_ms <= event.step_ms
    assert gc.callbacks == callbacks, "nothing is left behind"


def test_without_a_record_nothing_is_measured(tmp_path: Path) -> None:
    callbacks = list(gc.callbacks)

    def no_clock() -> float:
        raise AssertionError("asked for the time")

    writer = EventWriter(None)
    meter = StepMeter(nn.Linear(2, 2), device=CPU, writer=writer, rank=0, now=no_clock, clock=no_clock)
    meter.start()
    meter.lap("forward")
    meter.end(step=1, epoch=1, samples=1, loss=torch.tensor(1.0))
    meter.pause()
    meter.close()
    assert gc.callbacks == callbacks


# ------------------------------------------------------------------------------------------------- the GPU's clock


class FakeDevice:
    """Stands in for a GPU that does queued work on request; this machine need not have one."""

    def __init__(self) -> None:
        self.done = 0
        self.queued = 0
        self.made = 0
        self.current = threading.local()
        self.queried_on: set[object] = set()
        """The current device of the threads that queried an event; 0 where a thread has set none."""

    def set_current(self, which: object) -> None:
        self.current.device = which

    def event(self) -> FakeCudaEvent:
        self.made += 1
        return FakeCudaEvent(self)


class FakeCudaEvent:
    """What `CudaClock` uses of ``torch.cuda.Event``."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = math.inf

    def record(self, stream: object) -> None:
        self.device.queued += 1
        self.at = self.device.queued

    def query(self) -> bool:
        self.device.queried_on.add(getattr(self.device.current, "device", 0))
        return self.at <= self.device.done

    def elapsed_time(self, other: FakeCudaEvent) -> float:
        return other.at - self.at


def test_gpu_steps_become_events_in_order_when_the_device_has_done_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(
        "trainer.telemetry.step_meter.CudaClock",
        lambda where: CudaClock(where, device.event, lambda: None, device.set_current),
    )
    writer = EventWriter(tmp_path / "0.ndjson")
    moment = itertools.count(1000)
    meter = StepMeter(
        nn.Linear(2, 2),
        device=torch.device("cuda"),
        writer=writer,
        rank=0,
        now=lambda: float(next(moment)),
    )
    meter.start()
    for step in range(1, 5):
        meter.lap("forward")
        meter.end(step=step, epoch=1, samples=1, loss=0.5)
    assert writer.flush()
    assert _events(tmp_path) == [], "the device has done nothing yet"
    device.done = 5  # in the middle of the third step
    meter.pause()
    assert writer.flush()
    assert [event.step for event in _events(tmp_path)] == [1, 2]
    made = device.made
    meter.lap("forward")
    meter.end(step=5, epoch=1, samples=1, loss=0.5)
    assert device.made == made, "events are used again"
    device.done = device.queued
    meter.close()
    writer.close()
    events = _events(tmp_path)
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    assert [event.step_ms for event in events] == [2.0] * 5
    assert [event.forward_ms for event in events] == [1.0] * 5


def test_a_device_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainer.telemetry.step_meter.CudaClock",
        lambda where: CudaClock(where, FakeDevice().event, lambda: None, lambda _: None),
    )
    writer = EventWriter(tmp_path / "0.ndjson")
    meter = StepMeter(nn.Linear(2, 2), device=torch.device("cuda"), writer=writer, rank=0)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    meter.close(timeout_s=0.01)
    writer.close()
    assert _events(tmp_path) == []


def test_the_writers_thread_queries_events_on_its_ranks_device_and_records_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, second = FakeDevice(), torch.device("cuda", 1)
    monkeypatch.setattr(
        "trainer.telemetry.step_meter.CudaClock",
        lambda where: CudaClock(where, device.event, lambda: None, device.set_current, lambda _: 3 << 30),
    )
    writer = EventWriter(tmp_path / "0.ndjson")
    meter = StepMeter(nn.Linear(2, 2), device=second, writer=writer, rank=0)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    deadline = time.monotonic() + 30
    while not device.queried_on and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread writes ten times a second
    assert device.queried_on == {second}, "on GPU 0 it would open a context there"
    device.done = device.queued
    meter.close()
    writer.close()
    assert [event.memory_peak_bytes for event in _events(tmp_path)] == [3 << 30]


def test_numbers_are_fetched_from_a_device_without_a_host_wait() -> None:
    clock = CudaClock(CPU, FakeDevice().event, lambda: None)  # tensors on the CPU stand for those on a device
    with HostWaits():
        clock.mark()
        fetched = [clock.fetch((torch.tensor(1.5 + step), None, torch.tensor([2.5]), 0.5)) for step in range(2)]
    assert [numbers() for numbers in fetched] == [[1.5, None, 2.5, 0.5], [2.5, None, 2.5, 0.5]]


@pytest.mark.parametrize("has_handles", [True, False], ids=["handles", "an old torch"])
def test_marks_lie_on_the_current_stream_of_the_models_device(
    monkeypatch: pytest.MonkeyPatch, *, has_handles: bool
) -> None:
    device = torch.device("cuda", 1)
    current = ["first"]
    recorded: list[object] = []

    class Recorded(FakeCudaEvent):
        def record(self, stream: object) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: (where, current[0]))
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    if has_handles:
        handles = {(1, "first"): 7, (1, "second"): 8}
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: handles[index, current[0]], raising=False
        )
    clock = CudaClock(device, lambda: Recorded(FakeDevice()))
    for name in ("first", "first", "second", "first"):
        current[0] = name
        clock.mark()
    assert recorded == [(device, name) for name in ("first", "first", "second", "first")]


def test_a_device_that_failed_ends_the_measuring_and_not_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()

    class Failed(FakeCudaEvent):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    monkeypatch.setattr(
        "trainer.telemetry.step_meter.CudaClock",
        lambda where: CudaClock(where, lambda: Failed(device), lambda: None, device.set_current),
    )
    writer = EventWriter(tmp_path / "0.ndjson")
    meter = StepMeter(nn.Linear(2, 2), device=torch.device("cuda"), writer=writer, rank=0)
    meter.start()
    for step in range(1, 4):
        meter.end(step=step, epoch=1, samples=1)
        assert writer.flush(), "the writer's thread goes on"
    meter.close()
    writer.write(Failure(time=0.0, kind="exception", message="what the script raised", rank=0))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "0.ndjson").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["finding", "failure"]
    assert lines[0]["kind"] == "not_measured"
    assert lines[0]["message"].endswith("RuntimeError: CUDA error: device-side assert triggered")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_buckets_are_scaled_as_by_a_number(dtype: torch.dtype) -> None:
    bucket = torch.randn(4096, dtype=torch.float64).to(dtype)
    for world_size in range(2, 65):
        share = 1.0 / world_size
        assert torch.equal(bucket.clone().mul_(factor(share, dtype)), bucket.clone().mul_(share))
