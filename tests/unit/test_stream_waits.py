from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.telemetry.clocks import CudaClock
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.collectives.collective_times import collective_times
from trainer.telemetry.collectives.stream_waits import wrap_streams


class Event:
    """An event of a made device, with the time at which its stream reached it."""

    at_ms = 0.0

    def record(self, stream: Stream) -> None:
        self.at_ms = stream.reached_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


class Stream:
    """A stream of a made device: the time until which it has work."""

    def __init__(self) -> None:
        self.reached_ms = 0.0

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.reached_ms = max(self.reached_ms, event.at_ms)


class Group:
    def size(self) -> int:
        return 2


class Work:
    pass


@pytest.mark.parametrize(
    ("compute_until_ms", "exposed_ms"), [(25.0, 15.0), (60.0, 0.0)], ids=["not hidden", "hidden behind computing"]
)
def test_a_collective_on_another_stream_is_exposed_as_far_as_the_computing_stream_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, compute_until_ms: float, exposed_ms: float
) -> None:
    """As FSDP2 gathers the parameters of a module while the one before it computes."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # needs a GPU
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Stream, "record_event", Stream.record_event)  # restores them afterwards
    monkeypatch.setattr(Stream, "wait_event", Stream.wait_event)
    compute, comm = Stream(), Stream()
    current = compute
    clock = CudaClock(torch.device("cuda"), Event, lambda: current)
    meter, phases = CollectiveMeter(), ["forward"]
    meter.attach(clock, lambda: False)
    wrap_streams(meter)
    meter.begin_step(phases)
    start, work = clock.mark(), Work()
    group: Any = Group()

    compute.reached_ms = comm.reached_ms = 10.0
    current = comm
    call = meter.begin(group, "all_gather", Tensor())
    assert call is not None
    meter.launched(call, work)
    comm.reached_ms = 40.0
    waited = meter.begin_wait(work)
    assert waited is not None
    meter.end_wait(waited)
    gathered = comm.record_event()
    current = compute
    compute.reached_ms = compute_until_ms
    compute.wait_event(gathered)
    compute.wait_event(compute.record_event())  # for nothing that was communicated

    step = meter.take()
    assert step is not None
    times = collective_times(step, phases, start, clock)
    assert sum(times.exposed_ms.values()) == exposed_ms
    assert [sync.calls for sync in times.groups] == [1]
    assert (meter.fault, compute.reached_ms) == (None, max(compute_until_ms, 40.0))
    assert len(set(map(id, step.spent_marks()))) == len(step.spent_marks())
