"""Loops without DistributedDataParallel, or with other shapes than batches from a loader, measured unchanged."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_group import FSDP_ON_CPU, Gang
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.nn.functional import all_gather, all_reduce, all_to_all_single
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from trainer.contract.record import Finding, Step, decode_events
from trainer.telemetry import instrument

BATCH = 8
STEPS = 20
OWN_CODE_MS = 20.0

Loop = Callable[[int, int], tuple[nn.Module, list[float]]]
"""Takes the rank and a number of steps; returns the model and the loss that each step is to have on record."""


class Block(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            z: Tensor = self.down(torch.tanh(self.up(y)))
            return y + z

        y: Tensor = checkpoint(inner, x, use_reentrant=False) if self.recomputes else inner(x)
        return y


class Net(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(recomputes=recomputes), Block(recomputes=recomputes))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x))
        return y


class NetWithLoss(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return outputs, outputs.square().mean()


@torch.compiler.disable
def compute_for_long() -> None:
    end = time.perf_counter() + OWN_CODE_MS / 2e3
    while time.perf_counter() < end:
        pass


class SlowNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        compute_for_long()
        return super().forward(x)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(rank: int, count: int) -> list[Tensor]:
    points = torch.randn(count * BATCH, 4, generator=torch.Generator().manual_seed(rank))
    return list(points.split(BATCH))


def loader(rank: int, count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat(batches(rank, count))), batch_size=BATCH)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# ----------------------------------------------------------------------------------------------------- the loops


def sharded_by_block(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """FSDP2 with mixed precision and recomputed blocks, whose gradients are summed over two batches."""
    model = Net(recomputes=True)
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = sgd(model)
    losses: list[float] = []
    for number, (batch,) in enumerate(loader(rank, 2 * steps)):
        last = bool(number % 2)
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        loss = model(batch).float().square().mean() / 2
        loss.backward()
        losses = [*losses[:-1], losses[-1] + loss.item()] if last else [*losses, loss.item()]
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


def sharded_flat(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """FSDP1."""
    model = FullyShardedDataParallel(
        Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = sgd(model)
    return model, [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def tensor_parallel(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """Both ranks have a half of each block, and the same batches; the loss is a DTensor."""
    model, mesh = Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = sgd(model)
    losses = []
    for (batch,) in loader(0, steps):
        optimizer.zero_grad()
        loss = DTensor.from_local(model(batch), mesh, [Replicate()]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.to_local().item())
    return model, losses


def own_reduction(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """A sharded optimizer, and gradients that the script reduces itself."""
    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    losses = []
    for (batch,) in loader(rank, steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def local_steps(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """Local SGD: DDP reduces no gradients, and every third step the parameters are averaged."""
    model = DDP(Net())
    optimizer = sgd(model)
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps)):
        with model.no_sync():
            losses.append(train(model, optimizer, batch))
        if number % 3 == 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
    return model, losses


def without_loader(rank: int, steps: int, *, wrapped: bool = True) -> tuple[nn.Module, list[float]]:
    """Data from a function, which is called while the model's loss is there and backward was not called yet."""
    model: nn.Module = DDP(NetWithLoss()) if wrapped else NetWithLoss()
    optimizer = sgd(model)
    following = iter(batches(rank, 2 * steps + 1))

    def get_batch() -> Tensor:
        end = time.perf_counter() + OWN_CODE_MS / 2e3
        while time.perf_counter() < end:
            pass
        return next(following)

    batch, losses = get_batch(), []
    for _ in range(steps):
        losses.append(0.0)
        for last in (False, True):
            model.require_backward_grad_sync = last  # type: ignore[assignment]
            _, loss = model(batch)
            loss = loss / 2
            batch = get_batch()
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def without_loader_and_wrapper(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    return without_loader(rank, steps, wrapped=False)


def fetching_before_the_step(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """The next batch is made between the backward pass and the clipping of the gradients, as a prefetch."""
    model = Net()
    optimizer = sgd(model)
    losses = []
    for batch in batches(rank, steps):
        loss = model(batch).square().mean()
        loss.backward()
        compute_for_long()
        compute_for_long()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def compiled_without_loader(rank: int, steps: int, *, disabled: bool = False) -> tuple[nn.Module, list[float]]:
    """A compiled model whose forward pass is long, over two batches a step, and a batch that is made after backward."""
    model = SlowNet()
    compiled = torch.compile(model, backend="eager", disable=disabled)
    torch.compile(disable=disabled)(compute_for_long)  # as a decorator: never called
    optimizer = sgd(model)
    losses = []
    following = iter(batches(rank, 2 * steps + 1))
    batch = next(following)
    for _ in range(steps):
        losses.append(0.0)
        for _ in range(2):
            loss = compiled(batch).square().mean() / 2
            loss.backward()
            losses[-1] += loss.item()
            batch = next(following)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def compiler_is_off(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """As with TORCHDYNAMO_DISABLE=1: the module that is to be compiled is the model itself."""
    return compiled_without_loader(rank, steps, disabled=True)


def two_models_without_loader(rank: int, steps: int) -> tuple[nn.Module, list[float]]:
    """A discriminator and a generator, as in a GAN: their calls do not tell how many samples a step has."""
    discriminator, generator = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizer = sgd(nn.ModuleList([discriminator, generator]))
    losses = []
    for batch in batches(rank, steps):
        losses.append(0.0)
        for loss_of in (discriminator, lambda points: discriminator(generator(points))):
            loss = loss_of(batch).square().mean()
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList([discriminator, generator]), losses


# ----------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(2, timeout_s=300.0)  # two hundred steps on a busy machine
    yield gang
    gang.close()


def _run(rank: int, world_size: int, folder: str | None, loop: Loop, steps: int) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(1)
    if folder is not None:
        instrument.install(Path(folder, f"{rank}.ndjson"), rank)
    try:
        model, losses = loop(rank, steps)
    finally:
        instrument.finish()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not [hook for hook in hooks if type(hook).__module__.startswith("trainer")]
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [getattr(parameter, "_local_tensor", parameter).clone() for parameter in parameters], losses


def _steps(folder: Path, rank: int) -> list[Step]:
    path = folder / f"{rank}.ndjson"
    return [event for event in decode_events(path.read_bytes()) if isinstance(event, Step)]


def _mean(events: list[Step], name: str) -> float | None:
    """Return the mean of a duration over the steps after the first event; None where it is absent."""
    known = [(getattr(event, name), event.steps) for event in events[1:] if getattr(event, name) is not None]
    return sum(value * steps for value, steps in known) / sum(steps for _, steps in known) if known else None


PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "sync_exposed_ms")
LOOPS: dict[Loop, tuple[set[str], tuple[int | None, int | None]]] = {
    sharded_by_block: (set(), (2 * BATCH, 2 * BATCH)),
    sharded_flat: (set(), (BATCH, BATCH)),
    tensor_parallel: (set(), (BATCH, None)),
    own_reduction: (set(), (BATCH, BATCH)),
    local_steps: (set(), (BATCH, BATCH)),
    without_loader: ({"data_ms"}, (2 * BATCH, 2 * BATCH)),
    without_loader_and_wrapper: ({"data_ms", "sync_exposed_ms"}, (2 * BATCH, 2 * BATCH)),
    fetching_before_the_step: ({"data_ms", "sync_exposed_ms"}, (BATCH, BATCH)),
    compiled_without_loader: ({"data_ms", "sync_exposed_ms"}, (None, None)),
    compiler_is_off: ({"data_ms", "sync_exposed_ms"}, (2 * BATCH, 2 * BATCH)),
    two_models_without_loader: ({"data_ms", "sync_exposed_ms"}, (None, None)),
}
"""Loops, with the durations that cannot be known of them, and the samples of each rank in a step."""


@pytest.mark.parametrize("steps", [STEPS, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=pytest.mark.skipif(not FSDP_ON_CPU, reason="FSDP2 of this torch needs a GPU"))
        if loop is sharded_by_block
        else loop
        for loop in LOOPS
    ],
    ids=lambda loop: loop.__name__,
)
def test_phases_loss_and_samples_of_a_loop_are_on_record_and_its_results_are_its_own(
    gang: Gang, tmp_path: Path, loop: Loop, steps: int
) -> None:
    measured, alone = gang.run(_run, str(tmp_path), loop, steps), gang.run(_run, None, loop, steps)
    unknown, samples = LOOPS[loop]
    for rank, ((parameters, losses), (theirs, _)) in enumerate(zip(measured, alone, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(parameters, theirs, strict=True))
        events = _steps(tmp_path, rank)
        assert [loss for event in events for loss in (event.losses or [event.loss])] == pytest.approx(losses, rel=1e-5)
        assert {name for name in PHASES if _mean(events, name) is None} == unknown
        expected = samples[rank]
        assert [event.samples for event in events] == [expected and expected * event.steps for event in events]
        if loop in (without_loader, without_loader_and_wrapper, fetching_before_the_step):
            # That is the script's own code, wherever it is in the step.
            assert (_mean(events, "other_ms") or 0.0) >= OWN_CODE_MS
        if loop in (compiled_without_loader, compiler_is_off):
            assert (_mean(events, "forward_ms") or 0.0) >= OWN_CODE_MS


class DividedNet(nn.Module):
    """Each rank has a half of the hidden layer, and the ranks sum their outputs: tensor parallelism by hand."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = all_reduce(self.down(torch.tanh(self.up(x))), group=self.group)
        return y


class RingNet(Net):
    """Each rank has a part of each sample, and sends it to the next one."""

    def forward(self, x: Tensor) -> Tensor:
        rank, received = dist.get_rank(), torch.empty_like(x)
        sending = dist.isend(x.contiguous(), 1 - rank)
        dist.recv(received, 1 - rank)
        sending.wait()
        return super().forward(x + received)


class ExchangingNet(Net):
    """Each rank has a part of each sample, or experts for samples of all ranks, and exchanges parts with all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + all_to_all_single(torch.empty_like(x), x.contiguous(), group=self.group))


class GatheringNet(Net):
    """Each rank has a part of each sample, and attends to the parts of all; or samples of its own and statistics."""

    def __init__(self, *, of_parts: bool) -> None:
        super().__init__()
        self.of_parts = of_parts

    def forward(self, x: Tensor) -> Tensor:
        parts = all_gather(torch.tanh(self.blocks[0].up.weight.sum() * x) if self.of_parts else x)
        y: Tensor = super().forward(x + sum(parts))
        return y


def shared_batches(rank: int, steps: int, *, kind: str) -> tuple[nn.Module, list[float]]:
    """Both ranks train on the same batches; some make a mesh whose dimensions have names."""
    alone = [dist.new_group([member]) for member in range(2)][rank]
    if kind == "attention in a ring":
        model: nn.Module = DDP(RingNet())
    elif kind.startswith("all_gather"):
        if kind.endswith(" in a dimension cp"):
            init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = DDP(GatheringNet(of_parts="of parts" in kind))
    elif kind == "all_to_all":
        model = DDP(ExchangingNet(dist.new_group([0, 1])))
    elif kind.startswith("all_to_all in a dimension "):
        model = DDP(ExchangingNet(init_device_mesh("cpu", (2,), mesh_dim_names=(kind[-2:],)).get_group()))
    elif kind == "a group without a name":
        model = DividedNet(dist.new_group([0, 1]))
    elif kind == "replicas of a part":
        model = DDP(nn.Linear(4, 1), process_group=alone)
    else:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
        if kind == "parallelize_module":
            model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            model = DividedNet(mesh.get_group())
            model = DDP(model, process_group=alone) if kind == "replicas of a named part" else model
    optimizer = sgd(model)
    return model, [train(model, optimizer, batch) for (batch,) in loader(0, steps)]


EXCHANGING = "samples: the model computes with data of other ranks in its forward pass"


@pytest.mark.parametrize(
    ("kind", "unknown"),
    [
        ("parallelize_module", None),
        ("a named dimension", None),
        ("replicas of a named part", None),
        ("all_to_all in a dimension sp", None),
        ("all_to_all", EXCHANGING),
        ("all_gather of parts", EXCHANGING),
        ("all_gather of parts in a dimension cp", None),
        ("a group without a name", EXCHANGING),
        ("attention in a ring", EXCHANGING),
        ("replicas of a part", "samples: gradients are averaged over 1 of 2 ranks"),
    ],
)
def test_samples_that_ranks_share_count_once_or_are_unknown(
    gang: Gang, tmp_path: Path, kind: str, unknown: str | None
) -> None:
    loop = functools.partial(shared_batches, kind=kind)
    measured, alone = gang.run(_run, str(tmp_path), loop, 5), gang.run(_run, None, loop, 5)
    for rank, ((parameters, _), (theirs, _)) in enumerate(zip(measured, alone, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(parameters, theirs, strict=True))
        events = _steps(tmp_path, rank)
        known = rank == 0 and unknown is None
        assert [event.samples for event in events] == [BATCH * event.steps if known else None for event in events]
        found = decode_events((tmp_path / f"{rank}.ndjson").read_bytes())
        messages = [event.message for event in found if isinstance(event, Finding)]
        told = "and no DeviceMesh has a dimension tp, cp or sp of ranks with the same samples"
        told += ", or ep of experts" if kind.startswith("all_") else ""
        assert messages == ([] if unknown is None else [f"{unknown}, {told}"])


@pytest.mark.parametrize("kind", ["all_to_all in a dimension ep", "all_gather of statistics"])
def test_ranks_that_exchange_samples_for_their_experts_or_statistics_each_count_their_own(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    gang.run(_run, str(tmp_path), functools.partial(shared_batches, kind=kind), 5)
    for rank in range(2):
        assert [event.samples for event in _steps(tmp_path, rank)] == [BATCH * e.steps for e in _steps(tmp_path, rank)]


DIVIDES_GRADIENTS = "scale_grads" in inspect.signature(get_schedule_class("GPipe")).parameters
"""Whether this torch divides a pipeline's gradients by its micro-batches."""


def pipelined(
    rank: int, steps: int, *, schedule: str, scales: bool = True, loads: bool = True
) -> tuple[nn.Module, list[float | None]]:
    """Two ranks with a stage or two each: the mean of the four micro-batches' losses trains, or their sum."""
    torch_schedule = get_schedule_class(schedule)
    several = issubclass(torch_schedule, PipelineScheduleMulti)
    count = 4 if several else 2
    numbers = [rank, 3 - rank if schedule == "ZBVZeroBubble" else 2 + rank] if several else [rank]
    models = {number: nn.Linear(4, 1 if number == count - 1 else 4) for number in numbers}
    stages = []
    for number, model in models.items():
        inputs = torch.empty(2, 4, requires_grad=number > 0)
        outputs = torch.empty(2, model.out_features, requires_grad=True)
        stages.append(PipelineStage(model, number, count, torch.device("cpu"), input_args=inputs, output_args=outputs))
    own: Any = stages if several else stages[0]
    if DIVIDES_GRADIENTS:
        pipeline = torch_schedule(own, 4, loss_fn=nn.functional.mse_loss, scale_grads=scales)
    else:
        pipeline, scales = torch_schedule(own, 4, loss_fn=nn.functional.mse_loss), False
    optimizer = sgd(nn.ModuleList(models.values()))
    expected: list[float | None] = []
    for batch in (batch for (batch,) in loader(0, steps)) if loads else batches(0, steps):
        losses: list[Tensor] = []
        given = [batch] if 0 in numbers else []
        pipeline.step(*given, target=batch.sum(1, keepdim=True), losses=losses)
        is_last = count - 1 in numbers
        expected.append(sum(loss.item() for loss in losses) / (4 if scales else 1) if is_last else None)
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList(models.values()), expected


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "GPipe"},
        {"schedule": "GPipe", "scales": False},
        {"schedule": "GPipe", "loads": False},
        {"schedule": "1F1B"},
        {"schedule": "Interleaved1F1B"},
        {"schedule": "InterleavedZeroBubble"},
        {"schedule": "ZBVZeroBubble"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_rank_of_a_pipelines_last_stage_counts_whole_batches_and_has_the_loss_that_trains(
    gang: Gang, tmp_path: Path, options: dict[str, Any]
) -> None:
    if not DIVIDES_GRADIENTS and options["schedule"] != "GPipe":
        pytest.skip("on gloo this schedule of this torch does not end")
    loop = functools.partial(pipelined, **options)
    measured, alone = gang.run(_run, str(tmp_path), loop, 5), gang.run(_run, None, loop, 5)
    for rank, ((parameters, losses), (theirs, _)) in enumerate(zip(measured, alone, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(parameters, theirs, strict=True))
        events = _steps(tmp_path, rank)
        recorded = [loss for event in events for loss in (event.losses or [event.loss] * event.steps)]
        assert recorded == (losses if None in losses else pytest.approx(losses, rel=1e-5))
        assert [event.samples for event in events] == [None if None in losses else BATCH * e.steps for e in events]
        assert (_mean(events, "forward_ms") or 0.0) > 0.0
        assert (_mean(events, "backward_ms") or 0.0) > 0.0
        events = decode_events((tmp_path / f"{rank}.ndjson").read_bytes())
        assert not [event for event in events if isinstance(event, Finding) and event.kind == "not_measured"]
