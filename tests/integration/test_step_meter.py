from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_group import Gang
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import trainer
from trainer.contract.record import (
    Doing,
    EventWriter,
    Failure,
    Finding,
    Step,
    decode_events,
    encode_event,
    single_steps,
)
from trainer.host.core_waits import core_waits
from trainer.telemetry.clocks import CudaClock, HostClock
from trainer.telemetry.comm_hook import BucketHook, factor
from trainer.telemetry.ddp_log import DdpLog, sync_times
from trainer.telemetry.step_events import StepReading, Synchronisation, merge, step_event
from trainer.telemetry.step_meter import StepMeter
from trainer.telemetry.step_recorder import StepRecorder

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------- pure parts

LOG = {
    "iteration": 7,
    "backward_compute_time_start": 1_000_000,
    "backward_compute_time_end": 5_000_000,
    "backward_comm_time_start": 3_000_000,
    "backward_comm_time_end": 9_000_000,
    "bucket_sizes": "3000",
    "rebuilt_bucket_sizes": "1000, 2000",
}
LAYOUT = "1000, 2000"


def test_sync_times_come_from_the_stamps_of_this_iteration() -> None:
    times = sync_times(LOG, after=6, layout=LAYOUT)
    assert times is not None
    assert (times.sync_ms, times.exposed_ms, times.bucket_bytes, times.settled) == (6.0, 4.0, (1000, 2000), True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"iteration": 6}, "no synchronisation since the last read"),
        ({"backward_compute_time_start": 6_000_000}, "a forward without backward leaves the other stamps old"),
        ({"backward_comm_time_end": 4_000_000}, "reduced before the last bucket was ready"),
        ({"backward_comm_time_end": None}, "a stamp is missing"),
    ],
)
def test_stamps_that_are_not_of_one_synchronisation_are_no_value(change: dict[str, Any], why: str) -> None:
    data = {name: value for name, value in (LOG | change).items() if value is not None}
    assert sync_times(data, after=6, layout=LAYOUT) is None, why


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ({"iteration": 2, "rebuilt_bucket_sizes": None}, None),
        ({"iteration": 3}, None),
        ({}, "3000"),
    ],
    ids=["warm-up", "buckets were rebuilt late", "buckets changed"],
)
def test_warm_up_and_the_rebuild_of_buckets_are_not_settled(change: dict[str, Any], layout: str | None) -> None:
    times = sync_times(LOG | change, after=0, layout=layout)
    assert times is not None
    assert not times.settled


def test_launching_after_the_last_bucket_is_ready_exposes_everything() -> None:
    times = sync_times(LOG | {"backward_comm_time_start": 5_500_000}, after=6, layout=LAYOUT)
    assert times is not None
    assert (times.sync_ms, times.exposed_ms) == (3.5, 4.0)


def _step(step: int, **fields: Any) -> Step:
    return Step(**({"time": float(step), "rank": 0, "epoch": 1, "steps": 1, "samples": 8} | {"step": step} | fields))


def test_merged_steps_have_totals_means_of_what_was_measured_and_the_single_values() -> None:
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
        "marks": [(0.0, 0.0), (0.001, 0.0)], "phases": [], "numbers": lambda: (None, None, None), "grad_scale": 1.0,
        "log": None, "syncs": (), "warm": True,
    }  # fmt: skip
    return StepReading(**(base | fields))


def _event(reading: StepReading, sync: Synchronisation | None = None, *, synchronised: bool = False) -> Step:
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


def test_the_exposed_synchronisation_is_taken_out_of_the_backward_pass_where_it_is_known() -> None:
    reading = _reading(1, phases=["backward"], marks=[(0.0, 0.0), (0.01, 0.0), (0.01, 0.0)])
    sync = Synchronisation(sync_ms=5.0, exposed_ms=4.0, bucket_bytes=(6, 2), settled=True, bucket_ms=(1.0, 2.0))
    event = _event(reading, sync, synchronised=True)
    assert (event.backward_ms, event.sync_ms, event.sync_exposed_ms) == (6.0, 5.0, 4.0)
    assert (event.sync_bytes, event.sync_buckets, event.bucket_ms) == (4, 2, [1.0, 2.0]), "half of each byte is sent"
    unsettled = _event(reading, sync._replace(settled=False), synchronised=True)
    assert (unsettled.backward_ms, unsettled.sync_exposed_ms) == (6.0, None)
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


def _wait_for_events(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(_events(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------- one rank


class Hand:
    """A clock whose hand the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3


def _meter(folder: Path, hand: Hand, model: nn.Module | None = None) -> tuple[StepMeter, EventWriter]:
    writer = EventWriter(folder / "0.ndjson")
    model = model or nn.Linear(2, 2)
    return StepMeter(model, device=CPU, writer=writer, rank=0, now=lambda: 1000 + hand() * 100, clock=hand), writer


def test_a_step_runs_from_the_end_of_the_last_and_micro_steps_add_up(tmp_path: Path) -> None:
    hand = Hand()
    meter, writer = _meter(tmp_path, hand)
    meter.start()
    for step in (1, 2):
        for _ in range(2):
            for part, milliseconds in (("data", 1), ("h2d", 2), ("forward", 4), ("backward", 8)):
                hand.advance(milliseconds)
                meter.lap(part)
        hand.advance(16)
        meter.lap("optimizer")
        hand.advance(5)
        meter.end(step=step, epoch=1, loss=torch.tensor(0.5), samples=4, tokens=40, lr=0.1, grad_norm=2.0)
        hand.advance(100)  # a validation
        meter.pause()
        meter.start()
    meter.close()
    writer.close()
    for event in _events(tmp_path):
        parts = (event.data_ms, event.h2d_ms, event.forward_ms, event.backward_ms, event.optimizer_ms, event.step_ms)
        assert parts == pytest.approx((2, 4, 8, 16, 16, 51))
        assert (event.loss, event.grad_norm, event.samples, event.tokens, event.lr) == (0.5, 2.0, 4, 40, 0.1)
        assert event.gc_ms == 0.0
        assert event.sync_ms is event.sync_exposed_ms is event.sync_bytes is event.local_grad_norm is None


def test_what_is_done_between_two_steps_counts_to_the_next_one(tmp_path: Path) -> None:
    hand = Hand()
    meter, writer = _meter(tmp_path, hand)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    hand.advance(7)
    meter.end(step=2, epoch=1, samples=1)
    meter.close()
    writer.close()
    assert [event.step_ms for event in _events(tmp_path)] == pytest.approx([0.0, 7.0])


def test_the_first_step_and_the_last_are_written_without_waiting_for_more(tmp_path: Path) -> None:
    hand = Hand()
    meter, writer = _meter(tmp_path, hand)
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


def test_a_step_that_does_not_go_on_tells_once_what_it_is_at(tmp_path: Path) -> None:
    hand = Hand()
    meter, writer = _meter(tmp_path, hand)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    meter.lap("data")
    meter.lap("h2d")
    deadline = time.monotonic() + 10
    while not (found := _doing(tmp_path)) and time.monotonic() < deadline:
        hand.advance(1000)
        time.sleep(0.005)  # and no further call: a hang
    meter.lap("forward")
    meter.pause()
    hand.advance(60_000)  # a validation
    assert writer.flush()
    meter.close()
    writer.close()
    assert [(event.step, event.part, event.parts_done) for event in found] == [(2, "forward", 2)]
    assert len(_doing(tmp_path)) == 1


def _doing(folder: Path) -> list[Doing]:
    return [event for event in decode_events((folder / "0.ndjson").read_bytes()) if isinstance(event, Doing)]


def test_waits_for_a_core_are_recorded_per_phase_and_rounded() -> None:
    hand, waited = Hand(), Hand()
    clock = HostClock(hand, waited)
    marks, phases = [clock.mark()], ["data", "forward", "backward", "optimizer"]
    for milliseconds in (0.0, 3.0, 5.123456, 1.0):
        hand.advance(10)
        waited.advance(milliseconds)
        marks.append(clock.mark())
    waited.advance(70.0)
    marks.append(clock.mark(waits=False))
    event = step_event(
        _reading(1, marks=marks, phases=phases), clock, None, rank=0, synchronised=False, wire_ratio=None
    )
    assert event.core_wait_ms == {"forward": 3.0, "backward": 5.1235, "optimizer": 1.0}


def test_a_wait_after_a_mark_that_did_not_read_it_counts_to_the_next_phase() -> None:
    hand, waited = Hand(), Hand()
    clock = HostClock(hand, waited)
    marks = [clock.mark()]
    waited.advance(2.0)
    marks.append(clock.mark(waits=False))
    waited.advance(1.0)
    marks.append(clock.mark())
    assert clock.waits_ms(marks) == pytest.approx([0.0, 3.0])


def test_where_nobody_counts_waits_for_a_core_they_are_absent() -> None:
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
    assert meter.latest is None


# ------------------------------------------------------------------------------------------------- the GPU's clock


class Device:
    """Stands in for a GPU that does queued work when the test says so; this machine need not have one."""

    def __init__(self) -> None:
        self.done = 0
        self.queued = 0
        self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    """What `CudaClock` uses of ``torch.cuda.Event``."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = math.inf

    def record(self, stream: object) -> None:
        self.device.queued += 1
        self.at = self.device.queued

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_gpu_steps_become_events_in_order_when_the_device_has_done_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(
        "trainer.telemetry.step_meter.CudaClock", lambda where: CudaClock(where, device.event, lambda: None)
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
    assert meter.latest is None, "the device has done nothing yet"
    device.done = 5  # in the middle of the third step
    meter.pause()
    assert meter.latest is not None
    assert meter.latest.step == 2
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
        "trainer.telemetry.step_meter.CudaClock", lambda where: CudaClock(where, Device().event, lambda: None)
    )
    writer = EventWriter(tmp_path / "0.ndjson")
    meter = StepMeter(nn.Linear(2, 2), device=torch.device("cuda"), writer=writer, rank=0)
    meter.start()
    meter.end(step=1, epoch=1, samples=1)
    meter.close(timeout_s=0.01)
    writer.close()
    assert _events(tmp_path) == []


def test_marks_lie_on_the_models_device_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_stream", asked.append)
    CudaClock(torch.device("cuda", 1), Device().event).mark()
    assert asked == [torch.device("cuda", 1)]


def test_a_device_that_failed_ends_the_measuring_and_not_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()

    class Failed(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    monkeypatch.setattr(
        "trainer.telemetry.step_meter.CudaClock", lambda where: CudaClock(where, lambda: Failed(device), lambda: None)
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


def test_the_step_path_never_waits_for_the_device() -> None:
    folder = Path(trainer.__file__).parent / "telemetry"
    for name in ("step_meter.py", "clocks.py", "comm_hook.py", "step_events.py", "step_recorder.py"):
        text = (folder / name).read_text()
        for on_the_cpu in (BucketHook._reduce_and_wait, HostClock.fetch):
            text = text.replace(inspect.getsource(on_the_cpu), "")
        assert not re.search(r"synchronize\(|\.item\(|\.cpu\(|\.wait\(", text), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_timed_by_events_and_losses_arrive(tmp_path: Path) -> None:
    device = torch.device("cuda")
    writer = EventWriter(tmp_path / "0.ndjson")
    model = nn.Linear(512, 512, device=device)
    moment = itertools.count(1000)
    meter = StepMeter(model, device=device, writer=writer, rank=0, now=lambda: float(next(moment)))
    meter.start()
    for step in range(1, 21):
        loss = model(torch.ones(64, 512, device=device)).square().mean()
        meter.lap("forward")
        loss.backward()
        meter.lap("backward")
        meter.end(step=step, epoch=1, samples=64, loss=loss)
    meter.close()
    writer.close()
    events = _events(tmp_path)
    assert [event.step for event in events] == list(range(1, 21))
    assert all(event.forward_ms > 0 and event.backward_ms > 0 and event.loss is not None for event in events)


# ------------------------------------------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


class Delay(torch.autograd.Function):
    """Passes its input on and sleeps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.backward_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            x = Delay.apply(x, self.backward_s / 4)
        return x


PARAMETER_BYTES = 4 * (64 * 64 + 64) * 4


def _train(
    rank: int,
    world_size: int,
    folder: str,
    *,
    steps: int = 8,
    micro_steps: int = 1,
    record: bool = True,
    detail_every: int = 5,
    backward_delay: tuple[int, int, float] | None = None,
    ddp_options: dict[str, Any] | None = None,
    meter_options: dict[str, Any] | None = None,
    hook_of_its_own: bool = False,
    sync_each_micro_step: bool = False,
) -> list[Tensor]:
    """Train a small network; ``backward_delay`` is a rank, a step and seconds. Returns the parameters."""
    torch.manual_seed(1)
    net = Net()
    model = DistributedDataParallel(net, **({"bucket_cap_mb": 0.03} | (ddp_options or {})))
    if hook_of_its_own:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    writer = EventWriter(Path(folder) / f"{rank}.ndjson" if record else None)
    moment = itertools.count(1000)
    meter = StepMeter(
        model,
        device=CPU,
        writer=writer,
        rank=rank,
        detail_every=detail_every,
        now=lambda: float(next(moment)),
        **(meter_options or {}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    dist.barrier()
    meter.start()
    for step in range(1, steps + 1):
        net.backward_s = backward_delay[2] if backward_delay is not None and backward_delay[:2] == (rank, step) else 0.0
        for micro in range(micro_steps):
            x = torch.randn(16, 64)
            meter.lap("data")
            synchronised = sync_each_micro_step or micro == micro_steps - 1
            with contextlib.nullcontext() if synchronised else model.no_sync():
                loss = model(x).square().mean()
                meter.lap("forward")
                loss.backward()
                meter.lap("backward")
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        meter.lap("optimizer")
        meter.end(step=step, epoch=1, loss=loss, samples=16 * micro_steps, lr=0.1, grad_norm=norm)
    meter.close()
    writer.close()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _train_with(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[Tensor]:
    return _train(rank, world_size, folder, **options)


def _steps(folder: Path, rank: int) -> list[Step]:
    return [event for event in _events(folder, rank) if isinstance(event, Step)]


@pytest.mark.timing
@pytest.mark.parametrize("detail_every", [5, 0], ids=["own hook", "DDP's logger"])
def test_the_wait_is_seen_by_the_others_at_the_step_in_which_one_is_late(
    gang: Gang, tmp_path: Path, detail_every: int
) -> None:
    gang.run(_train_with, str(tmp_path), {"backward_delay": (1, 6, 0.2), "detail_every": detail_every})
    waiting, late = _steps(tmp_path, 0), _steps(tmp_path, 1)
    exposed = [event.sync_exposed_ms for event in waiting]
    assert exposed[5] > 150
    assert max(exposed[4], exposed[6]) < 100, "values belong to their own step"
    assert late[5].sync_exposed_ms < exposed[5] - 100
    assert late[5].backward_ms > 190, "the delay is the late rank's own work"
    assert waiting[5].backward_ms < 100
    for event in waiting + late:
        parts = [event.data_ms, event.forward_ms, event.backward_ms, event.optimizer_ms, event.sync_exposed_ms or 0.0]
        assert sum(parts) <= event.step_ms * 1.001


def test_warm_up_has_no_synchronisation_values_and_later_steps_have_all(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"steps": 11})
    events = _steps(tmp_path, 0)
    assert [event.step for event in events] == list(range(1, 12))
    for event in events[:2]:
        assert event.sync_ms is event.sync_exposed_ms is event.sync_bytes is event.bucket_ms is None
        assert event.backward_ms is not None
    for event in events[2:]:
        assert event.sync_ms >= event.sync_exposed_ms > 0
        assert event.sync_bytes == PARAMETER_BYTES
        assert event.sync_buckets == 2
    sampled = [event.step for event in events if event.bucket_ms is not None]
    assert sampled == [3, 6, 11]
    assert [event.step for event in events if event.local_grad_norm is not None] == sampled
    for event in events:
        if event.bucket_ms is not None:
            assert len(event.bucket_ms) == 2
            assert 0 < max(event.bucket_ms) <= event.sync_ms * 1.01 + 0.5


def test_every_fast_step_is_measured_in_all_phases(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"steps": 100})
    for rank in range(2):
        events = _steps(tmp_path, rank)
        assert [event.step for event in events] == list(range(1, 101))
        for event in events:
            assert None not in (event.loss, event.grad_norm, event.data_ms, event.forward_ms, event.backward_ms)
            assert event.step_ms >= event.forward_ms + event.backward_ms + event.optimizer_ms
        assert all(event.sync_exposed_ms is not None for event in events[2:])


def test_accumulated_micro_steps_synchronise_once(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"micro_steps": 3})
    for event in _steps(tmp_path, 0)[2:]:
        assert event.sync_bytes == PARAMETER_BYTES
        assert event.samples == 48
        assert event.forward_ms > 0


def test_synchronisations_at_each_micro_step_add_up(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"micro_steps": 2, "sync_each_micro_step": True, "steps": 11})
    events = _steps(tmp_path, 0)
    for event in events[2:]:
        assert event.sync_bytes == 2 * PARAMETER_BYTES
        assert event.sync_buckets == 4
        assert event.sync_ms >= event.sync_exposed_ms > 0
        assert event.backward_ms > 0
    detailed = [event for event in events if event.bucket_ms is not None]
    assert [len(event.bucket_ms) for event in detailed] == [4, 4, 4]
    assert all(event.local_grad_norm is None for event in events), "after the first the gradient is everybody's"


@pytest.mark.parametrize(
    ("options", "settled_from"),
    [
        ({"static_graph": True}, 4),
        ({"find_unused_parameters": True}, 3),
        ({"gradient_as_bucket_view": True}, 3),
    ],
    ids=["static graph", "unused parameters", "bucket views"],
)
@pytest.mark.parametrize("detail_every", [1, 0], ids=["own hook", "DDP's logger"])
def test_each_way_of_wrapping_gives_synchronisation_values(
    gang: Gang, tmp_path: Path, options: dict[str, Any], settled_from: int, detail_every: int
) -> None:
    gang.run(_train_with, str(tmp_path), {"ddp_options": options, "detail_every": detail_every})
    events = _steps(tmp_path, 1)
    assert all(event.sync_exposed_ms is None for event in events[: settled_from - 1])
    assert all(event.sync_exposed_ms > 0 for event in events[settled_from - 1 :])
    assert all(event.sync_bytes == PARAMETER_BYTES for event in events[settled_from - 1 :])
    assert all(bool(event.bucket_ms) == bool(detail_every) for event in events[settled_from - 1 :])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_buckets_are_scaled_as_by_a_number(dtype: torch.dtype) -> None:
    bucket = torch.randn(4096, dtype=torch.float64).to(dtype)
    for world_size in range(2, 65):
        share = 1.0 / world_size
        assert torch.equal(bucket.clone().mul_(factor(share, dtype)), bucket.clone().mul_(share))


def test_measuring_does_not_change_the_training(gang: Gang, tmp_path: Path) -> None:
    measured = gang.run(_train_with, str(tmp_path), {"detail_every": 1})
    plain = gang.run(_train_with, str(tmp_path), {"record": False})
    for ours, theirs in zip(measured, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _local_norms(rank: int, world_size: int) -> float:
    torch.manual_seed(1)
    net = Net()
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        net(torch.randn(16, 64)).square().mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        for parameter in net.parameters():
            assert parameter.grad is not None
            if step < 2:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world_size)
        optimizer.step()
        optimizer.zero_grad()
    return float(norm)


def test_the_local_gradient_norm_is_this_ranks_own_before_the_reduction(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"steps": 3})
    expected = gang.run(_local_norms)
    for rank in range(2):
        assert _steps(tmp_path, rank)[2].local_grad_norm == pytest.approx(expected[rank], rel=1e-4)
    assert expected[0] != pytest.approx(expected[1], rel=1e-4)


def test_another_comm_hook_is_wrapped_and_its_bytes_are_counted(gang: Gang, tmp_path: Path) -> None:
    options = {"comm_hook": (None, default_hooks.fp16_compress_hook), "wire_ratio": 0.5}
    measured = gang.run(_train_with, str(tmp_path), {"meter_options": options, "detail_every": 1})
    plain = gang.run(_train_with, str(tmp_path), {"meter_options": options, "record": False})
    for ours, theirs in zip(measured, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    event = _steps(tmp_path, 0)[-1]
    assert event.sync_bytes == PARAMETER_BYTES // 2
    assert event.bucket_ms is not None


def test_a_hook_that_is_there_already_is_left_alone_and_told_once(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"hook_of_its_own": True})
    told = [event for event in _events(tmp_path, 0) if isinstance(event, Finding)]
    assert [(event.kind, event.severity) for event in told] == [("not_measured", "info")]
    assert "comm hook already" in told[0].message
    last = _steps(tmp_path, 0)[-1]
    assert last.sync_ms is not None
    assert last.bucket_ms is last.local_grad_norm is None


class BrokenClock(HostClock):
    """Fails after a few marks, on one rank only."""

    def __init__(self, marks: int) -> None:
        super().__init__(self._mark)
        self._left = marks

    def _mark(self) -> float:
        self._left -= 1
        if self._left < 0:
            raise OSError("no clock")
        return 0.0


def _measure_with_a_broken_clock(rank: int, world_size: int, marks: int) -> tuple[bool, str | None]:
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.03)
    hook = BucketHook(model, BrokenClock(marks if rank == 0 else 1000))
    complete = False
    for _ in range(4):
        hook.measure(detailed=True)
        model(torch.randn(16, 64)).square().mean().backward()
        complete = len(hook.take()) == 1
    return complete, hook.fault


@pytest.mark.parametrize("marks", [0, 2, 5, 6, 7])
def test_a_fault_while_measuring_ends_the_measuring_and_not_the_training(gang: Gang, marks: int) -> None:
    (complete, fault), healthy = gang.run(_measure_with_a_broken_clock, marks)
    assert not complete
    assert fault is not None
    assert "OSError: no clock" in fault
    assert healthy == (True, None)


def _train_without_the_private_interface(rank: int, world_size: int, folder: str) -> None:
    original = DistributedDataParallel._get_ddp_logging_data
    del DistributedDataParallel._get_ddp_logging_data
    try:
        _train(rank, world_size, folder, detail_every=0)
    finally:
        DistributedDataParallel._get_ddp_logging_data = original  # type: ignore[method-assign]


def test_without_ddps_private_logger_its_values_are_absent_and_told_once(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_without_the_private_interface, str(tmp_path))
    events = _steps(tmp_path, 0)
    told = [event for event in _events(tmp_path, 0) if isinstance(event, Finding)]
    assert ["no DDP runtime logger" in event.message for event in told] == [True]
    assert len(events) == 8
    assert all(event.sync_ms is event.sync_exposed_ms is event.backward_ms is None for event in events)
    assert all(event.forward_ms is not None for event in events)


def _both_ways(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Measure the same synchronisations by the future's callbacks and by DDP's logger."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.015)
    hook = BucketHook(model, HostClock(), waits=False)
    log = DdpLog(model)
    exposed = []
    for _ in range(14):
        model.module.backward_s = 0.1 * rank
        hook.measure(detailed=True)
        model(torch.randn(16, 64)).square().mean().backward()
        (buckets,), times = hook.take(), log.read()
        assert times is not None
        exposed.append((buckets.exposed_ms(HostClock()), times.exposed_ms))
    return exposed[2:]


@pytest.mark.timing
def test_our_hook_and_ddps_logger_agree(gang: Gang) -> None:
    for exposed in gang.run(_both_ways):
        ours, theirs = (statistics.median(values) for values in zip(*exposed, strict=True))
        assert ours == pytest.approx(theirs, abs=20.0), "of about 100 ms on rank 0 and about 1 ms on rank 1"
