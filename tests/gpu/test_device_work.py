"""What is queued on a GPU: no wait in a step, the comm hook's sums, copies beside the computation, memory, speed."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_tasks import WideTask
from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worker_contexts import worker_context

from trainer.checkpoint import CheckpointWriter, load
from trainer.contract.options import Training
from trainer.contract.record import EventWriter, Step, decode_events
from trainer.engine.accelerator import DeviceCopy
from trainer.engine.loop import Loop
from trainer.engine.worker_context import WorkerContext
from trainer.telemetry.clocks import CudaClock
from trainer.telemetry.comm_hook import BucketHook
from trainer.telemetry.step_meter import StepMeter

GPU = torch.device("cuda", 0)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of NCCL with one rank, in which collectives and DDP are real."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, device_id=GPU)
    yield
    dist.destroy_process_group()


def context(writer: EventWriter, waits: Callable[[], None] = lambda: None) -> WorkerContext:
    return worker_context(device=GPU, writer=writer, before_wait=waits)


@pytest.mark.parametrize("count_per_sample", [None, 3], ids=["counts on the device", "counts known"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_step_waits_for_the_device(tmp_path: Path, count_per_sample: int | None, num_workers: int) -> None:
    begun: list[bool] = []

    class SyncErrorTask(TinyTask):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            if self.calls == 2:
                begun.append(True)
                torch.cuda.set_sync_debug_mode("error")
            return super().loss(model, batch)

    def stop() -> None:  # before the last evaluation and the save, which may wait
        if begun:
            torch.cuda.set_sync_debug_mode("default")

    task = SyncErrorTask(TinyOptions(masked=count_per_sample is None, valid_samples=5, samples=200))
    task.count_per_sample = count_per_sample
    options = Training(
        batch_size=(5,),
        max_updates=60,
        update_freq=(2,),
        optimizer="adam",
        clip_norm=0.1,
        desync_every=1,
        valid_every_epochs=0,
        save_every_epochs=0,
        num_workers=num_workers,
    )
    writer = EventWriter(tmp_path / "0.ndjson")
    try:
        Loop(task, options, context(writer, stop)).run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    writer.close()
    steps = [event for event in decode_events((tmp_path / "0.ndjson").read_bytes()) if isinstance(event, Step)]
    assert sum(event.steps for event in steps) == 60
    assert all(event.loss is not None and event.step_ms and event.memory_peak_bytes for event in steps)


def test_steps_are_timed_by_events_without_a_wait_and_losses_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(tmp_path / "0.ndjson")
    model = nn.Linear(512, 512, device=GPU)
    moment = itertools.count(1000)
    meter = StepMeter(model, device=GPU, writer=writer, rank=0, now=lambda: float(next(moment)))
    batch = torch.ones(64, 512, device=GPU)
    with monkeypatch.context() as patch:
        for waits in ("Event.synchronize", "Stream.synchronize", "synchronize"):
            patch.setattr(f"torch.cuda.{waits}", lambda *_: pytest.fail("the step path waits for the device"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            meter.start()
            for step in range(1, 21):
                loss = model(batch).square().mean()
                meter.lap("forward")
                loss.backward()
                meter.lap("backward")
                meter.end(step=step, epoch=1, samples=64, loss=loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    meter.close()
    writer.close()
    events: list[Any] = list(decode_events((tmp_path / "0.ndjson").read_bytes()))
    assert [event.step for event in events] == list(range(1, 21))
    assert all(event.forward_ms > 0 and event.backward_ms > 0 and event.loss is not None for event in events)


def trained(hook: Callable[[DistributedDataParallel], BucketHook | None]) -> tuple[Tensor, list[float]]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).to(GPU)
    ddp = DistributedDataParallel(model, device_ids=[GPU], bucket_cap_mb=1, gradient_as_bucket_view=True)
    measured = hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    sync_ms = []
    clock = CudaClock(GPU)
    for _ in range(8):
        if measured is not None:
            measured.measure(detailed=True)
        optimizer.zero_grad()
        ddp(torch.randn(32, 512, device=GPU)).square().mean().backward()
        optimizer.step()
        if measured is not None:
            torch.cuda.synchronize()
            sync_ms += [buckets.sync_ms(clock) for buckets in measured.take()]
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), sync_ms


@pytest.mark.usefixtures("one_rank")
def test_the_comm_hook_averages_bit_for_bit_as_ddp_does() -> None:
    plain, _ = trained(lambda ddp: None)
    hooked, sync_ms = trained(lambda ddp: BucketHook(ddp, CudaClock(GPU), waits=False))
    assert torch.equal(hooked, plain)
    assert len(sync_ms) == 8
    assert all(taken > 0 for taken in sync_ms)


def test_a_batch_that_is_copied_on_its_own_stream_is_complete_when_it_is_used() -> None:
    copy = DeviceCopy(GPU)
    for number in range(50):
        batch = torch.full((1 << 20,), float(number), pin_memory=True)
        torch.cuda._sleep(100_000)  # the computation of the step before
        moved = copy({"x": batch})["x"]
        assert float(moved.sum()) == number * (1 << 20)


def test_a_checkpoint_has_the_state_of_its_moment_though_training_goes_on(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 22, device=GPU)
    writer = CheckpointWriter(tmp_path, keep_last=5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 4):
            weight += 1
            writer.save({"weight": weight}, step=step)
            weight += 100  # queued behind the copy
            weight -= 100
    finally:
        torch.cuda.set_sync_debug_mode("default")
    writer.close()
    kept = {path.name: load(path)["weight"] for path in tmp_path.glob("step_*.pt")}
    assert "step_00000003.pt" in kept
    for name, saved in kept.items():
        assert torch.equal(saved, torch.full_like(saved, float(name[5:13])))


SEGMENTS = """
import json, torch
from trainer.contract.options import Training
from trainer.engine.accelerator import prepare_environment
prepare_environment(Training(deterministic=True))
torch.empty(1 << 24, device="cuda")
torch.use_deterministic_algorithms(True)
a = torch.randn(64, 64, device="cuda")
(a @ a).sum().item()
print(json.dumps([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]))
"""


def test_the_allocator_grows_its_segments_and_deterministic_products_run() -> None:
    environ = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key and "CUBLAS" not in key}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SEGMENTS], capture_output=True, text=True, env=environ, cwd=root)
    assert done.returncode == 0, done.stderr
    assert any(json.loads(done.stdout))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_on_the_second_gpu_opens_no_context_on_the_first(tmp_path: Path) -> None:
    script = """
import sys, time, torch
from pathlib import Path
from torch import nn
from trainer.contract.record import EventWriter
from trainer.telemetry.step_meter import StepMeter
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
free, _ = torch.cuda.mem_get_info(1)
writer = EventWriter(Path(sys.argv[1]))
meter = StepMeter(nn.Linear(2, 2, device=device), device=device, writer=writer, rank=1)
meter.start()
meter.end(step=1, epoch=1, samples=1, loss=torch.ones((), device=device))
time.sleep(1)
meter.close(); writer.close()
"""
    before, _ = torch.cuda.mem_get_info(0)
    with subprocess.Popen(
        [sys.executable, "-c", script + "print('done', flush=True); sys.stdin.read()", str(tmp_path / "0.ndjson")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        assert rank.stdout.readline() == "done\n"
        after, _ = torch.cuda.mem_get_info(0)
        rank.stdin.close()  # type: ignore[union-attr]
    assert before - after < 64 << 20


# ------------------------------------------------------------------------------------------------- speed

STEPS, WARM_UP = 400, 50


def by_hand(width: int) -> float:
    """Return seconds per step of a loop written by hand with torch alone."""
    task = WideTask(TinyOptions(width=width))
    dataset = task.datasets()["train"]
    model = task.model().to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = itertools.cycle(range(0, 4096, 64))

    def step() -> None:
        start = next(order)
        batch = task.collate([dataset[index] for index in range(start, start + 64)])
        inputs, targets = (part.pin_memory().to(GPU, non_blocking=True) for part in batch)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def ours(width: int, folder: Path) -> float:
    """Return seconds per step of our loop, recording as in real use."""
    times: list[float] = []

    class TimedTask(WideTask):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            self.calls += 1
            if self.calls in (WARM_UP + 1, WARM_UP + STEPS + 1):
                torch.cuda.synchronize()
                times.append(time.perf_counter())
            return super().loss(model, batch)

    options = Training(
        batch_size=(64,), max_updates=WARM_UP + STEPS + 1, clip_norm=1.0, shuffle=False, save_every_epochs=0
    )
    writer = EventWriter(folder / "0.ndjson")
    Loop(TimedTask(TinyOptions(width=width)), options, context(writer)).run()
    writer.close()
    return (times[1] - times[0]) / STEPS


@pytest.mark.parametrize(("width", "least"), [(256, 0.6), (8192, 0.9)], ids=["bound by the host", "bound by the GPU"])
def test_our_loop_is_about_as_fast_as_one_written_by_hand(tmp_path: Path, width: int, least: float) -> None:
    rounds = []
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        rounds.append((by_hand(width), ours(width, folder)))
    hand, own = (min(each) for each in zip(*rounds, strict=True))
    print(f"width {width}: {1e3 * hand:.3f} ms a step by hand, {1e3 * own:.3f} ms here")
    assert hand / own >= least
