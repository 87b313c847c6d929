"""Collectives on a GPU's further streams: only the training's stream waits, where it is told to. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.telemetry.clocks import CudaClock
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.collectives.collective_times import collective_times
from trainer.telemetry.collectives.group_names import NamedGroup


class Stream:
    """Stream with a time of its own, ms."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.ms = 0.0


class Event:
    """CUDA event: the time of its stream when it was recorded."""

    def record(self, stream: Stream) -> None:
        self.ms = stream.ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


class Group:
    def size(self) -> int:
        return 2


class Gpu:
    """A meter of a rank with a training stream and another one."""

    def __init__(self) -> None:
        self.training, self.other = Stream(1), Stream(2)
        self.current = self.training
        self.captures = False
        self.clock = CudaClock(
            torch.device("cuda"), event=Event, stream=lambda: self.current, is_capturing=lambda: self.captures
        )
        self.meter = CollectiveMeter()
        self.meter.attach(self.clock, lambda: False)
        self.group = Group()
        self.meter.names.index = lambda group: 0  # type: ignore[method-assign]
        self.meter.names.named.append(NamedGroup("dp_shard", [0, 1]))
        self.meter.begin_step([])
        self.start = self.clock.mark()

    def gather(self, stream: Stream, ms: float) -> Any:
        """Gather for some time on a stream, in order with the training's; return an event behind it."""
        self.current, stream.ms = stream, max(stream.ms, self.training.ms)
        call = self.meter.begin(self.group, "all_gather", [torch.ones(4)])
        assert call is not None
        stream.ms += ms
        self.meter.launched(call, None)
        event = Event()
        event.record(stream)
        self.meter.recorded(event, stream)
        self.current = self.training
        return event

    def wait(self, event: Any) -> None:
        call = self.meter.begin_event_wait(event, self.training)
        self.training.ms = max(self.training.ms, event.ms)
        if call is not None:
            self.meter.end_wait(call)

    def times(self) -> Any:
        step = self.meter.take()
        assert step is not None
        marks = list(step.spent_marks())
        assert len(marks) == len(set(marks)), "a mark is put back once"
        return collective_times(step, ["forward"], self.start, self.clock)


def test_a_collective_on_the_training_stream_blocks_it() -> None:
    gpu = Gpu()
    gpu.gather(gpu.training, 3.0)
    assert gpu.times().exposed_ms == {"forward": 3.0}


def test_a_collective_on_another_stream_blocks_where_the_training_stream_waits_for_it() -> None:
    gpu = Gpu()
    event = gpu.gather(gpu.other, 5.0)
    gpu.training.ms += 2.0  # computes meanwhile
    gpu.wait(event)
    times = gpu.times()
    assert times.exposed_ms == {"forward": 3.0}
    assert (times.groups[0].exposed_ms, times.groups[0].total_ms, times.total_ms) == (3.0, 5.0, 5.0)


def test_a_hidden_collective_and_an_event_without_one_block_nothing() -> None:
    gpu = Gpu()
    event = gpu.gather(gpu.other, 5.0)
    gpu.training.ms += 9.0
    gpu.wait(event)
    unrelated = Event()
    unrelated.record(gpu.training)
    gpu.meter.recorded(unrelated, gpu.training)
    gpu.wait(unrelated)
    times = gpu.times()
    assert (times.exposed_ms, times.groups[0].calls, times.groups[0].exposed_ms) == ({}, 1, 0.0)


def test_where_nothing_waits_the_exposed_time_is_unknown() -> None:
    gpu = Gpu()
    gpu.gather(gpu.other, 5.0)
    assert gpu.times().groups[0].exposed_ms is None


def test_what_is_captured_into_a_graph_is_not_followed() -> None:
    gpu = Gpu()
    gpu.captures = True
    assert gpu.meter.begin(gpu.group, "all_gather", [torch.ones(4)]) is None


def test_a_fault_of_the_device_ends_the_measuring_and_not_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu()

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.meter._is_capturing = fail
    assert gpu.meter.begin(gpu.group, "all_gather", []) is None
    assert not gpu.meter.on
    assert gpu.meter.take() is None
    assert capsys.readouterr().err.count("\n") == 1
