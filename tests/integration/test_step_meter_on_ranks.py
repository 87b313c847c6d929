from __future__ import annotations

import contextlib
import itertools
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

from trainer.contract.record import (
    Doing,
    EventWriter,
    Finding,
    Step,
    decode_events,
)
from trainer.telemetry.clocks import HostClock
from trainer.telemetry.comm_hook import BucketHook, CommHook
from trainer.telemetry.step_meter import StepMeter

CPU = torch.device("cpu")


def _events(folder: Path, rank: int = 0) -> list[Any]:
    return list(decode_events((folder / f"{rank}.ndjson").read_bytes()))


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
@pytest.mark.parametrize("comm_hook", [None, (None, default_hooks.allreduce_hook)], ids=["averaged", "another hook"])
def test_the_wait_is_seen_by_the_others_at_the_step_in_which_one_is_late(
    gang: Gang, tmp_path: Path, comm_hook: tuple[None, CommHook] | None
) -> None:
    gang.run(_train_with, str(tmp_path), {"backward_delay": (1, 6, 0.2), "meter_options": {"comm_hook": comm_hook}})
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
def test_each_way_of_wrapping_gives_synchronisation_values(
    gang: Gang, tmp_path: Path, options: dict[str, Any], settled_from: int
) -> None:
    gang.run(_train_with, str(tmp_path), {"ddp_options": options, "detail_every": 1})
    events = _steps(tmp_path, 1)
    assert all(event.sync_exposed_ms is None for event in events[: settled_from - 1])
    assert all(event.sync_exposed_ms > 0 for event in events[settled_from - 1 :])
    assert all(event.sync_bytes == PARAMETER_BYTES for event in events[settled_from - 1 :])
    assert all(event.bucket_ms for event in events[settled_from - 1 :])


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


def test_an_existing_comm_hook_is_kept_and_reported_once(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"hook_of_its_own": True})
    findings = [event for event in _events(tmp_path, 0) if isinstance(event, Finding)]
    assert [(event.kind, event.severity) for event in findings] == [("not_measured", "info")]
    assert "comm hook already" in findings[0].message
    last = _steps(tmp_path, 0)[-1]
    assert last.sync_ms is last.sync_exposed_ms is last.backward_ms is last.local_grad_norm is None
    assert last.forward_ms is not None


def test_without_a_comm_hook_synchronisation_is_not_measured(gang: Gang, tmp_path: Path) -> None:
    gang.run(_train_with, str(tmp_path), {"detail_every": 0})
    events = _steps(tmp_path, 0)
    assert len(events) == 8
    assert all(event.sync_ms is event.backward_ms is event.local_grad_norm is None for event in events)
    assert all(event.forward_ms is not None for event in events)


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


def _wait_long(rank: int, world_size: int, folder: str) -> str:
    """Let a rank hang in its forward pass after two collectives; return what its record has of them."""
    from trainer.distributed import flight_recorder

    file = Path(folder) / f"collectives_{rank}"
    flight_recorder.prepare(file, rank, {})
    writer = EventWriter(Path(folder) / f"{rank}.ndjson", rank=rank)
    hours = itertools.count(step=3600)
    meter = StepMeter(nn.Linear(2, 2), device=CPU, writer=writer, rank=rank, clock=lambda: float(next(hours)))
    meter.start()
    dist.all_reduce(torch.ones(3, 5))
    dist.barrier()
    meter.lap("data")
    found: list[Doing] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)  # the writer's thread goes on
        # The clock is fast enough for a report of the phase before, in which the collectives are not over.
        found = [event for event in _events(Path(folder), rank) if isinstance(event, Doing) and event.part == "h2d"]
    meter.close()
    writer.close()
    assert file.with_name(f"{file.name}.json").read_bytes().startswith(b"{")
    return found[0].collectives


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records no collectives of gloo"
)
def test_a_rank_that_waits_long_records_its_last_collectives(gang: Gang, tmp_path: Path) -> None:
    for words in gang.run(_wait_long, str(tmp_path)):
        assert "all_reduce" in words
        assert "of [3, 5], barrier" in words
        assert "are complete" in words


def _local_norm(rank: int, world_size: int, folder: str, dtype: torch.dtype) -> tuple[list[str], list[float | None]]:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False, dtype=dtype))
    writer = EventWriter(Path(folder) / f"{rank}.ndjson", rank=rank)
    meter = StepMeter(model, device=CPU, writer=writer, rank=rank, detail_every=1)
    meter.start()
    for step in range(1, 5):
        model.zero_grad()
        model(torch.full((1, 2), 3.0 + rank, dtype=dtype)).sum().backward()
        meter.end(step=step, epoch=1, samples=1)
        assert writer.flush()
    meter.close()
    writer.close()
    events = _events(Path(folder), rank)
    norms = [event.local_grad_norm for event in events if isinstance(event, Step) and event.step == 4]
    return [event.message for event in events if isinstance(event, Finding)], norms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_local_gradient_norm_is_measured_in_every_number_format(
    gang: Gang, tmp_path: Path, dtype: torch.dtype
) -> None:
    for rank, (faults, norms) in enumerate(gang.run(_local_norm, str(tmp_path), dtype)):
        assert faults == []
        assert norms == [pytest.approx((3.0 + rank) * 2**0.5, rel=1e-3)]
