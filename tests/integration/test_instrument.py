"""Loops that know nothing of us, measured: their steps and losses are on record, their results the same bits."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_group import FSDP_ON_CPU, Gang
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer.contract.record import Finding, Step, decode_events, single_steps
from trainer.telemetry import instrument

BATCH = 8
STEPS = 6
SYNC = {"sync_ms", "sync_exposed_ms", "sync_bytes"}
FIELDS = {"data_ms", "forward_ms", "backward_ms", "optimizer_ms", *SYNC}
PARAMETER_BYTES = 4 * (4 * 16 + 16 + 16 + 1)

Loop = Callable[[int, int], tuple[list[nn.Module], list[float]]]
"""Takes the rank and a number of steps; returns the models and the loss that each step is to have on record."""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader(rank: int, batches: int, seed: int = 0) -> DataLoader[Any]:
    points = torch.randn(batches * BATCH, 4, generator=torch.Generator().manual_seed(2 * seed + rank))
    return DataLoader(TensorDataset(points), batch_size=BATCH)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# ----------------------------------------------------------------------------------------------------- the loops


def plain(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = sgd(model)
    return [model], [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def accumulating(rank: int, steps: int, *, no_sync: bool) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = sgd(model)
    losses: list[float] = []
    for number, (batch,) in enumerate(loader(rank, 3 * steps)):
        model.require_backward_grad_sync = number % 3 == 2 or not no_sync
        loss = model(batch).square().mean() / 3
        loss.backward()
        losses = [*losses, loss.item()] if number % 3 == 0 else [*losses[:-1], losses[-1] + loss.item()]
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [model], losses


def leftovers(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Epochs of seven batches, three for each step: the gradients of the seventh are set to zero, unused."""
    model = DDP(net())
    optimizer = sgd(model)
    losses: list[float] = []
    for epoch in range(steps // 2):
        optimizer.zero_grad()
        loss = 0.0
        for number, (batch,) in enumerate(loader(rank, 7, seed=epoch), start=1):
            part = model(batch).square().mean() / 3
            part.backward()
            loss += part.item()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
                loss = 0.0
    return [model], losses


def leftovers_that_are_fetched_first(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The same without a wrapper, with gradients that are set to zero once the next epoch's first batch is there."""
    model = net()
    optimizer = sgd(model)
    losses: list[float] = []
    for epoch in range(steps // 2):
        loss = 0.0
        for number, (batch,) in enumerate(loader(rank, 7, seed=epoch)):
            if number % 3 == 0:
                model.zero_grad(set_to_none=False)
                loss = 0.0
            part = model(batch).square().mean() / 3
            part.backward()
            loss += part.item()
            if number % 3 == 2:
                optimizer.step()
                losses.append(loss)
    return [model], losses


def leftovers_that_train(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The gradients of an epoch's last batch stay, as part of the next epoch's first step."""
    model = DDP(net())
    optimizer = sgd(model)
    losses, loss = [], 0.0
    for epoch in range(2):
        for number, (batch,) in enumerate(loader(rank, 7, seed=epoch), start=1):
            part = model(batch).square().mean() / 3
            part.backward()
            loss += part.item()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
                loss = 0.0
    return [model], losses


def accumulating_without_sync(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    return accumulating(rank, steps, no_sync=True)


def accumulating_with_sync(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    return accumulating(rank, steps, no_sync=False)


def two_backwards(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The first loss has its own backward pass, and the others one by ``torch.autograd``."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    for (batch,) in loader(rank, steps):
        optimizer.zero_grad()
        one = model(batch).square().mean()
        one.backward()
        two = model(batch + 1).abs().mean()
        three = two.exp()
        torch.autograd.backward([two, three])
        optimizer.step()
        losses.append(one.item() + two.item() + three.item())
    return [model], losses


def adversarial(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Two optimizers in turn."""
    return _adversarial(DDP(nn.Linear(4, 4)), rank, steps)


def adversarial_with_one_wrapper(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The wrapped discriminator is called twice for its backward pass, on one batch."""
    return _adversarial(nn.Linear(4, 4), rank, steps)


def generator_at_every_second_step(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    return _adversarial(DDP(nn.Linear(4, 4)), rank, steps, every=2)


def generator_at_every_second_step_with_one_wrapper(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    return _adversarial(nn.Linear(4, 4), rank, steps, every=2)


def _adversarial(generator: nn.Module, rank: int, steps: int, every: int = 1) -> tuple[list[nn.Module], list[float]]:
    discriminator = DDP(net())
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    losses = []
    for (batch,) in loader(rank, steps):
        of_discriminator.zero_grad()
        one = discriminator(batch).mean() - discriminator(generator(batch).detach()).mean()
        one.backward()
        of_discriminator.step()
        losses.append(one.item())
        if len(losses) % every == 0:
            of_generator.zero_grad()
            two = discriminator(generator(batch)).mean()
            two.backward()
            of_generator.step()
            losses[-1] += two.item()
    return [generator, discriminator], losses


def several_steps_for_one(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """One optimizer steps at each batch, another at every third: the first one's steps count, on the same batch."""
    model, head = DDP(net()), DDP(nn.Linear(4, 1))
    often, rarely = sgd(model), sgd(head)
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps), start=1):
        losses.append(train(model, often, batch) + (train(head, rarely, batch) if number % 3 == 0 else 0.0))
    return [model, head], losses


def one_optimizer_after_the_other(rank: int, steps: int) -> tuple[list[nn.Module], list[Any]]:
    """A second model is trained after the first: its first two steps are told apart when the second one is done."""
    models = [DDP(net()), DDP(net())]
    trained = [(model, sgd(model)) for model in models]
    losses: list[Any] = [
        train(*trained[number // steps], batch) for number, (batch,) in enumerate(loader(rank, 2 * steps))
    ]
    losses[steps : steps + 2] = None, None
    return models, losses


def closure(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    for (batch,) in loader(rank, steps):

        def compute(batch: Tensor = batch) -> float:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss.item()

        optimizer.step(compute)
    return [model], losses


def scaler_that_skips(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps + 2)):
        loss = model(batch).square().mean() * (float("inf") if number in (0, 3) else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses += [] if number in (0, 3) else [loss.item()]
    return [model], losses


def scaled_losses(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Two losses that are scaled before the first backward pass, their scaled sum, and a list."""
    model = DDP(net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps)):
        outputs = model(batch)
        one, two = outputs.square().mean(), outputs.abs().mean()
        if number % 3 == 2:
            torch.autograd.backward(scaler.scale([one, two]))
        else:
            of_one, of_two = scaler.scale(one), scaler.scale(two)
            for loss in (of_one, of_two) if number % 3 else (of_one + of_two,):
                loss.backward(retain_graph=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(one.item() + two.item())
    return [model], losses


def own_comm_hook(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = sgd(model)
    losses = [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]
    assert [hook for hook, _ in model._comm_hooks] == [default_hooks.allreduce_hook]
    return [model], losses


def comm_hook_that_comes_late(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = sgd(model)
    calls = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(1)
        return default_hooks.allreduce_hook(None, bucket)

    hook.__annotations__.clear()  # those of this file are strings, which DDP refuses
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps)):
        if number == 2:
            model.register_comm_hook(calls, hook)
        losses.append(train(model, optimizer, batch))
    assert len(calls) == steps - 2
    assert [each for each, _ in model._comm_hooks] == [hook]
    return [model], losses


def compiled_within(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(torch.compile(net(), backend="eager"))
    optimizer = sgd(model)
    return [model], [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def compiled_around(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = torch.compile(DDP(net()), backend="eager")
    optimizer = sgd(model)
    return [model], [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def without_ddp(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = net()
    optimizer = sgd(model)
    return [model], [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def sharded(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = sgd(model)
    return [model], [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def wrapped_late(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    inner = net()
    optimizer = sgd(inner)
    model: nn.Module = inner
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps)):
        if number == 2:
            model = DDP(inner)
        losses.append(train(model, optimizer, batch))
    return [model], losses


class FailsTwice(nn.Module):
    """Raises in the second forward pass, and in the backward pass of the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 2:
            raise ValueError("no forward")
        y: Tensor = self.inner(x)
        if self.count == 4:
            y.register_hook(_refuse)
        return y


def _refuse(_: Tensor) -> None:
    raise ValueError("no backward")


def failing_and_going_on(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(FailsTwice(), find_unused_parameters=True)
    optimizer = sgd(model)
    losses = []
    for (batch,) in loader(rank, steps + 2):
        try:
            losses.append(train(model, optimizer, batch))
        except ValueError:
            optimizer.zero_grad()
    return [model], losses


def uneven_inputs(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    with model.join(divide_by_initial_world_size=False):
        for (batch,) in loader(rank, steps + 3 * rank):
            losses.append(train(model, optimizer, batch))
    return [model], losses


def accumulating_within_no_sync(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The model's own context, with the forward pass within it too."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    batches = iter(loader(rank, 2 * steps))
    for (first,), (second,) in zip(batches, batches, strict=True):
        with model.no_sync():
            one = model(first).square().mean()
            one.backward()
        two = model(second).square().mean()
        two.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(one.item() + two.item())
    return [model], losses


def lbfgs(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """An optimizer that calls its closure several times in a step: the loss is that of the first call.

    The ranks have equal batches, since each decides by its own loss how often it does.
    """
    model = DDP(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    losses = []
    for (batch,) in loader(0, steps):

        def compute(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(compute).item())  # type: ignore[arg-type]
    return [model], losses


def patched_call(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The script has put something of its own around every module."""
    own = nn.Module.__call__
    calls = []

    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        calls.append(type(self))
        return own(self, *given, **named)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        model = DDP(net())
        optimizer = sgd(model)
        losses = [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]
    finally:
        nn.Module.__call__ = own  # type: ignore[method-assign]
    assert calls.count(DDP) == steps
    return [model], losses


def gradients_of_many_numbers(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """A backward pass of two tensors at once, of which the first one is the loss."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    for (batch,) in loader(rank, steps):
        optimizer.zero_grad()
        outputs = model(batch)
        loss = outputs.square().mean()
        torch.autograd.backward([loss, outputs], [None, torch.full_like(outputs, 1e-3)])
        optimizer.step()
        losses.append(loss.item())
    return [model], losses


class _OwnOptimizer(torch.optim.SGD):
    """Steps twice for each call of step, by its class's own step."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


def own_optimizer(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = DDP(net())
    optimizer = _OwnOptimizer(model.parameters(), lr=0.1)
    return [model], [train(model, optimizer, batch) for (batch,) in loader(rank, steps)]


def two_models_one_optimizer(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    body, head = DDP(nn.Linear(4, 4)), DDP(net())
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for (batch,) in loader(rank, steps):
        optimizer.zero_grad()
        loss = head(body(batch)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [body, head], losses


def cached_gradients(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The loss is of outputs without gradients; theirs are handed to the model by halves of the batch afterwards."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    for (batch,) in loader(rank, steps):
        with torch.no_grad():
            outputs = model(batch)
        outputs.requires_grad_()
        loss = (outputs - outputs.detach().flip(0) + 1).square().mean()
        loss.backward()
        for part, gradient in zip(batch.chunk(2), outputs.grad.chunk(2), strict=True):
            torch.dot(model(part).flatten(), gradient.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [model], losses


LOOPS: dict[Loop, set[str]] = {
    cached_gradients: set(),
    accumulating_within_no_sync: set(),
    lbfgs: set(),
    patched_call: set(),
    gradients_of_many_numbers: set(),
    own_optimizer: set(),
    two_models_one_optimizer: set(),
    plain: set(),
    accumulating_without_sync: set(),
    accumulating_with_sync: set(),
    two_backwards: set(),
    adversarial: set(),
    adversarial_with_one_wrapper: set(),
    generator_at_every_second_step: set(),
    generator_at_every_second_step_with_one_wrapper: set(),
    several_steps_for_one: set(),
    one_optimizer_after_the_other: set(),
    closure: set(),
    scaler_that_skips: set(),
    scaled_losses: set(),
    own_comm_hook: set(),
    comm_hook_that_comes_late: set(),
    compiled_within: set(),
    compiled_around: set(),
    without_ddp: SYNC,
    sharded: set(),
    wrapped_late: set(),
    failing_and_going_on: set(),
    uneven_inputs: set(),
}
"""Loops, with the fields that cannot be known of them."""


# ----------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


def _run(
    rank: int, world_size: int, folder: str | None, loop: Loop, steps: int
) -> tuple[list[Tensor], list[float], float]:
    torch.manual_seed(1)
    if folder is not None:
        instrument.install(Path(folder, f"{rank}.ndjson"), rank)
    began = time.perf_counter()
    try:
        models, losses = loop(rank, steps)
    finally:
        elapsed_ms = 1e3 * (time.perf_counter() - began)
        instrument.finish()
    parameters = [parameter.detach() for model in models for parameter in model.parameters()]
    local = [getattr(parameter, "_local_tensor", parameter).clone() for parameter in parameters]
    return local, losses, elapsed_ms


def _steps(folder: Path, rank: int) -> list[Step]:
    path = folder / f"{rank}.ndjson"
    return [event for event in decode_events(path.read_bytes()) if isinstance(event, Step)]


def _losses(events: list[Step]) -> list[float | None]:
    return [loss for event in events for loss in (event.losses or [event.loss] * event.steps)]


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=pytest.mark.skipif(not FSDP_ON_CPU, reason="FSDP2 of this torch needs a GPU"))
        if loop is sharded
        else loop
        for loop in LOOPS
    ],
    ids=lambda loop: loop.__name__,
)
def test_the_steps_of_a_loop_are_on_record_and_its_results_are_its_own(gang: Gang, tmp_path: Path, loop: Loop) -> None:
    measured = gang.run(_run, str(tmp_path), loop, STEPS)
    alone = gang.run(_run, None, loop, STEPS)
    for rank, ((parameters, expected, _), (theirs, _, _)) in enumerate(zip(measured, alone, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(parameters, theirs, strict=True))
        events = _steps(tmp_path, rank)
        assert _losses(events) == [loss if loss is None else pytest.approx(loss, rel=1e-5) for loss in expected]
        assert events[-1].step == len(expected)
        assert all(event.lr == 0.1 and event.epoch == 1 for event in events)
        known = {name for name in FIELDS if any(getattr(event, name) is not None for event in events)}
        assert known == FIELDS - LOOPS[loop]


def test_two_hundred_steps_give_the_same_bits_and_each_is_on_record_with_its_samples(
    gang: Gang, tmp_path: Path
) -> None:
    measured = gang.run(_run, str(tmp_path), plain, 200)
    alone = gang.run(_run, None, plain, 200)
    for rank, ((ours, losses, _), (theirs, _, _)) in enumerate(zip(measured, alone, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        events = _steps(tmp_path, rank)
        assert _losses(events) == pytest.approx(losses, rel=1e-5)
        assert sum(event.samples for event in events) == 200 * BATCH
        assert sum(len(event.step_ms_each or [event.step_ms]) for event in events) == 200
        assert {event.sync_bytes for event in (*events[2:], events[-1])} == {PARAMETER_BYTES}


def uneven_epochs(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Two steps of all ranks, and then epochs in which rank 0 runs out of data first."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = [train(model, optimizer, batch) for (batch,) in loader(rank, 2)]
    for epoch in (1, 2):
        with model.join(divide_by_initial_world_size=False):
            losses += [train(model, optimizer, batch) for (batch,) in loader(rank, steps + 3 * rank, seed=epoch)]
    return [model], losses


def test_ranks_that_run_out_of_data_average_over_those_that_have_some_and_measure_their_own_steps(
    gang: Gang, tmp_path: Path
) -> None:
    measured = gang.run(_run, str(tmp_path), uneven_epochs, STEPS)
    alone = gang.run(_run, None, uneven_epochs, STEPS)
    for rank, ((parameters, losses, _), (theirs, _, _)) in enumerate(zip(measured, alone, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(parameters, theirs, strict=True))
        events = _steps(tmp_path, rank)
        assert _losses(events) == pytest.approx(losses, rel=1e-5)
        assert sum(event.steps for event in events) == 2 + 2 * (STEPS + 3 * rank)
        # How many steps an event covers depends on how fast they are: there may be two events in all.
        (message,) = _findings(tmp_path, rank)
        assert message.startswith("step 3 was made within join(), where a rank may run out of data before others, so")
        for event in (*events[2:], events[-1]):  # means over the event's steps, each rounded
            assert _bucket_bytes(event) == pytest.approx(PARAMETER_BYTES, abs=1), "and none of the others' steps"


def _bucket_bytes(event: Step) -> int:
    assert event.sync_bytes is not None
    return event.sync_bytes - round(sum(group.bytes for group in event.groups or ()))


def one_model_after_the_other(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    models = [DDP(net()), DDP(net())]
    trained = [(model, sgd(model)) for model in models]
    return models, [train(*each, torch.randn(BATCH, 4)) for each in trained for _ in range(steps // 2)]


def embedding_before_the_model(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    embedding, model = nn.Linear(4, 4), DDP(net())
    optimizer = sgd(model)
    return [model], [train(model, optimizer, embedding(torch.randn(BATCH, 4)).detach()) for _ in range(steps)]


def pipeline(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Each rank has a stage; in each step there are two micro-batches, all forward passes first."""
    stage: nn.Module = nn.Linear(4, 4) if rank == 0 else nn.Linear(4, 1)
    optimizer = sgd(stage)
    losses = []
    for _ in range(steps):
        halves = torch.randn(2, BATCH // 2, 4).unbind()
        if rank == 0:
            outputs = [stage(half) for half in halves]
            for output in outputs:
                dist.send(output.detach(), 1)
            for output, half in zip(outputs, halves, strict=True):
                dist.recv(half, 1)
                output.backward(half)
        else:
            for half in halves:
                dist.recv(half, 0)
                loss = stage(half.requires_grad_()).square().mean()
                loss.backward()
                losses.append(loss.item())
            for half in halves:
                assert half.grad is not None
                dist.send(half.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
    return [stage], losses


def accumulating_without_wrapper(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Three batches a step, of which the very first is there before anything of the training is seen."""
    model = net()
    optimizer = sgd(model)
    next(iter(loader(rank, steps)))
    for number, (batch,) in enumerate(loader(rank, 3 * steps), start=1):
        model(batch).square().mean().div(3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [model], []


def adversarial_without_wrapper(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    generator, discriminator = nn.Linear(4, 4), net()
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    for (batch,) in loader(rank, steps):
        of_discriminator.zero_grad()
        discriminator(batch).mean().backward()
        discriminator(generator(batch).detach()).mean().neg().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator(generator(batch)).mean().backward()
        of_generator.step()
    return [generator, discriminator], []


def fetching_ahead(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The next batch is fetched between the backward pass and the optimizer's step."""
    model = net()
    optimizer = sgd(model)
    batches = iter(loader(rank, steps))
    batch = next(batches, None)
    while batch is not None:
        model(batch[0]).square().mean().backward()
        batch = next(batches, None)
        optimizer.step()
        optimizer.zero_grad()
    return [model], []


def fetching_ahead_in_epochs(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The next batch is fetched before the model is called: an epoch's last step fetches none."""
    model = net()
    optimizer = sgd(model)
    for epoch in range(3):
        batches = iter(loader(rank, steps, seed=epoch))
        following = next(batches, None)
        while following is not None:
            (batch,), following = following, next(batches, None)
            train(model, optimizer, batch)
    return [model], []


def short_batches_passed_over(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Each epoch ends with a batch of three, on which nothing is trained."""
    model = net()
    optimizer = sgd(model)
    for epoch in range(3):
        points = torch.randn(steps * BATCH + 3, 4, generator=torch.Generator().manual_seed(epoch))
        for (batch,) in DataLoader(TensorDataset(points), batch_size=BATCH):
            if len(batch) == BATCH:
                train(model, optimizer, batch)
    return [model], []


def evaluating_with_gradients(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """An evaluation after each epoch, without ``no_grad``."""
    model = net()
    optimizer = sgd(model)
    for epoch in range(3):
        model.train()
        for (batch,) in loader(rank, steps, seed=epoch):
            train(model, optimizer, batch)
        model.eval()
        for (batch,) in loader(rank, 2, seed=3):
            model(batch)
    return [model], []


def minibatches_of_a_batch(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Four steps with each batch that is fetched: twice with each half of it."""
    model = net()
    optimizer = sgd(model)
    for (batch,) in loader(rank, steps):
        for half in (*batch.split(BATCH // 2), *batch.split(BATCH // 2)):
            train(model, optimizer, half)
    return [model], []


def two_loaders(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Batches of two loaders in each step, for parts that have a module each."""
    one, other = net(), net()
    optimizer = sgd(nn.ModuleList([one, other]))
    for (first,), (second,) in zip(loader(rank, steps), loader(rank, steps), strict=True):
        (one(first).mean() + other(second).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one, other], []


def backward_for_each_half(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The wrapped model is called twice on each batch, with a backward pass each, as a discriminator is."""
    model = DDP(net())
    optimizer = sgd(model)
    for (batch,) in loader(rank, steps):
        model(batch).mean().backward()
        model(batch + 1).mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model], []


def two_views_of_a_batch(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Without a wrapper, and the model is called twice for one backward pass."""
    model = net()
    optimizer = sgd(model)
    for (batch,) in loader(rank, steps):
        (model(batch) - model(batch + torch.randn_like(batch))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model], []


def two_passes_on_a_batch_in_epochs(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """The second pass is at other parameters, as of sharpness-aware minimization."""
    model = DDP(net())
    optimizer = sgd(model)
    for epoch in range(3):
        for (batch,) in loader(rank, steps, seed=epoch):
            for _ in range(2):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
            optimizer.step()
    return [model], []


def head_after_its_model(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """A wrapped model, and then another one on its outputs, with an optimizer of its own."""
    model, head = DDP(net()), DDP(nn.Linear(1, 1))
    of_model = sgd(model)
    for (batch,) in loader(rank, steps):
        train(model, of_model, batch)
    of_head = sgd(head)
    for (batch,) in loader(rank, steps, seed=1):
        with torch.no_grad():
            outputs = model(batch)
        train(head, of_head, outputs)
    return [model, head], []


def meta_learning(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Inner steps by ``torch.autograd.grad`` on data of no loader: the model is called for support and query sets."""
    model = net()
    optimizer = sgd(model)
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(2):
            parameters = dict(model.named_parameters())
            inner = functional_call(model, parameters, torch.randn(5, 4)).square().mean()
            gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
            of_task = {name: each - 0.1 * g for (name, each), g in zip(parameters.items(), gradients, strict=True)}
            total = total + functional_call(model, of_task, torch.randn(10, 4)).square().mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model], []


def actor_and_critic(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Two wrapped models, and samples of a replay buffer."""
    actor, critic = DDP(nn.Linear(4, 4)), DDP(net())
    of_actor, of_critic = sgd(actor), sgd(critic)
    for _ in range(steps):
        train(critic, of_critic, torch.randn(BATCH, 4))
        of_actor.zero_grad()
        critic(actor(torch.randn(BATCH, 4))).mean().backward()
        of_actor.step()
    return [actor, critic], []


def step_left_out(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Every third batch is left out after the forward pass, as one whose loss is not finite."""
    model = DDP(net())
    optimizer = sgd(model)
    for number, (batch,) in enumerate(loader(rank, steps)):
        if number % 3 == 2:
            model(batch)
        else:
            train(model, optimizer, batch)
    return [model], []


def test_a_step_after_one_that_is_left_out_has_no_samples(gang: Gang, tmp_path: Path) -> None:
    gang.run(_run, str(tmp_path), step_left_out, 2 * STEPS)
    for rank in range(2):
        steps = [step for event in _steps(tmp_path, rank) for step in single_steps(event)]
        assert [step.samples for step in steps] == [BATCH, BATCH, *[None, BATCH] * 3]


def pseudo_labels(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """In each step the wrapped model computes labels without gradients, on batches of a loader, for 20 ms."""
    model = DDP(net())
    optimizer = sgd(model)
    for (batch,) in loader(rank, steps):
        with torch.no_grad():
            labels = model(batch)
            time.sleep(0.02)
        (model(batch) - labels).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model], []


def test_a_pass_without_gradients_on_a_batch_of_the_training_is_a_part_of_its_step(gang: Gang, tmp_path: Path) -> None:
    gang.run(_run, str(tmp_path), pseudo_labels, STEPS)
    for rank in range(2):
        events = _steps(tmp_path, rank)
        steps = [step for event in events for step in single_steps(event)]
        # That the iterator is the training's is known once it has given a batch within the training.
        assert all((step.step_ms or 0.0) >= 20.0 for step in steps[2:])
        assert events[-1].data_ms is not None


@pytest.mark.parametrize("loop", [meta_learning, actor_and_critic])
def test_samples_of_several_calls_without_a_loader_are_absent_and_the_record_has_the_reason(
    gang: Gang, tmp_path: Path, loop: Loop
) -> None:
    gang.run(_run, str(tmp_path), loop, STEPS)
    for rank in range(2):
        assert {event.samples for event in _steps(tmp_path, rank)} == {None}
        why = "samples: a step calls several models, or one several times, and no DataLoader gives its batch"
        assert _findings(tmp_path, rank) == [why]


def _findings(folder: Path, rank: int) -> list[str]:
    found = decode_events((folder / f"{rank}.ndjson").read_bytes())
    return [event.message for event in found if isinstance(event, Finding)]


def two_trainings_in_threads(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Of the second thread no step is measured."""
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    losses = [train(models[0], optimizers[0], torch.randn(BATCH, 4))]
    second = threading.Thread(target=train, args=(models[1], optimizers[1], torch.randn(BATCH, 4)))
    second.start()
    second.join()
    losses += [train(models[0], optimizers[0], torch.randn(BATCH, 4)) for _ in range(steps - 1)]
    return models, losses


def test_a_training_in_a_second_thread_is_said_not_to_be_measured(gang: Gang, tmp_path: Path) -> None:
    measured = gang.run(_run, str(tmp_path), two_trainings_in_threads, STEPS)
    for rank, (_, losses, _) in enumerate(measured):
        assert _losses(_steps(tmp_path, rank)) == pytest.approx(losses, rel=1e-5)
        (message,) = _findings(tmp_path, rank)
        assert message == "an optimizer steps in another thread than the first, whose training alone is measured"


def leaving_before_the_first_step(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    model = net()
    sgd(model)
    return [model], []


def test_a_rank_that_leaves_before_its_first_step_gets_no_advice(gang: Gang, tmp_path: Path) -> None:
    gang.run(_run, str(tmp_path), leaving_before_the_first_step, STEPS)
    for rank in range(2):
        (found,) = decode_events((tmp_path / f"{rank}.ndjson").read_bytes())
        assert isinstance(found, Finding)
        assert found.message == "the script ended before its first step: it made an optimizer and called no model"
        assert (found.severity, found.advice) == ("info", "")


@pytest.mark.parametrize(
    ("loop", "by_rank"),
    [
        (one_model_after_the_other, (STEPS * BATCH, STEPS * BATCH)),
        (embedding_before_the_model, (STEPS * BATCH, STEPS * BATCH)),
        (pipeline, (None, STEPS * BATCH)),
        (accumulating_without_wrapper, (3 * STEPS * BATCH, 3 * STEPS * BATCH)),
        (adversarial, (STEPS * BATCH, STEPS * BATCH)),
        (adversarial_with_one_wrapper, (STEPS * BATCH, STEPS * BATCH)),
        (generator_at_every_second_step, (STEPS * BATCH, STEPS * BATCH)),
        (generator_at_every_second_step_with_one_wrapper, (STEPS * BATCH, STEPS * BATCH)),
        (backward_for_each_half, (STEPS * BATCH, STEPS * BATCH)),
        (two_views_of_a_batch, (STEPS * BATCH, STEPS * BATCH)),
        (two_passes_on_a_batch_in_epochs, (3 * STEPS * BATCH, 3 * STEPS * BATCH)),
        (head_after_its_model, (2 * STEPS * BATCH, 2 * STEPS * BATCH)),
        (adversarial_without_wrapper, (STEPS * BATCH, STEPS * BATCH)),
        (fetching_ahead, (STEPS * BATCH, STEPS * BATCH)),
        (fetching_ahead_in_epochs, (3 * STEPS * BATCH, 3 * STEPS * BATCH)),
        (short_batches_passed_over, (3 * STEPS * BATCH, 3 * STEPS * BATCH)),
        (evaluating_with_gradients, (3 * STEPS * BATCH, 3 * STEPS * BATCH)),
        (minibatches_of_a_batch, (2 * STEPS * BATCH, 2 * STEPS * BATCH)),
        (two_loaders, (2 * STEPS * BATCH, 2 * STEPS * BATCH)),
    ],
)
def test_a_sample_counts_once_whatever_the_number_of_models(
    gang: Gang, tmp_path: Path, loop: Loop, by_rank: tuple[int | None, int | None]
) -> None:
    gang.run(_run, str(tmp_path), loop, STEPS)
    for rank, samples in enumerate(by_rank):
        recorded = [event.samples for event in _steps(tmp_path, rank)]
        assert (None if None in recorded else sum(filter(None, recorded))) == samples


def without_what_is_not_finite(
    rank: int, steps: int, *, wrap: Callable[[nn.Module], nn.Module] = DDP
) -> tuple[list[nn.Module], list[float]]:
    """No step is made of gradients that are not finite, of every third batch."""
    model = wrap(net())
    optimizer = sgd(model)
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps + steps // 2)):
        loss = model(batch).square().mean() * (float("nan") if number % 3 == 1 else 1.0)
        loss.backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
    return [model], losses


def without_what_is_not_finite_of_one(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    return without_what_is_not_finite(rank, steps, wrap=lambda model: model)


def gradients_of_two_loaders(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Gradients are set to zero between two losses, and both kept: the step is made of their sum."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    for batches in zip(loader(rank, steps), loader(rank, steps, seed=1), strict=True):
        kept, loss = [], 0.0
        for (batch,) in batches:
            optimizer.zero_grad()
            part = model(batch).square().mean()
            part.backward()
            kept.append([parameter.grad.clone() for parameter in model.parameters()])
            loss += part.item()
        for parameter, one, other in zip(model.parameters(), *kept, strict=True):
            parameter.grad = one + other
        optimizer.step()
        losses.append(loss)
    return [model], losses


@pytest.mark.parametrize(
    ("loop", "samples"),
    [
        (without_what_is_not_finite, [BATCH] * STEPS),
        (without_what_is_not_finite_of_one, [BATCH] * STEPS),
        (gradients_of_two_loaders, [2 * BATCH] * STEPS),
        (leftovers, [3 * BATCH] * STEPS),
        (leftovers_that_are_fetched_first, [3 * BATCH] * STEPS),
        (leftovers_that_train, [3 * BATCH, 3 * BATCH, 4 * BATCH, 3 * BATCH]),
    ],
)
def test_a_batch_whose_gradients_are_set_to_zero_before_a_step_counts_to_none(
    gang: Gang, tmp_path: Path, loop: Loop, samples: list[int]
) -> None:
    measured = gang.run(_run, str(tmp_path), loop, STEPS)
    for rank, (_, losses, _) in enumerate(measured):
        events = _steps(tmp_path, rank)
        assert _losses(events) == pytest.approx(losses, rel=1e-5)
        assert sum(event.samples for event in events) == sum(samples)
        assert all(event.samples == samples[event.step - 1] for event in events if event.steps == 1)


def generator_at_every_third_step(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """Two models without a DataLoader, of which one reduces its gradients in some steps only."""
    generator, critic = DDP(nn.Linear(4, 4)), DDP(net())
    of_generator, of_critic = sgd(generator), sgd(critic)
    for number in range(steps):
        train(critic, of_critic, torch.randn(2 * BATCH, 4))
        if number % 3 == 2:
            critic(generator(torch.randn(BATCH, 4))).mean().backward()
            of_generator.step()
    return [generator, critic], []


def test_synchronisation_is_measured_where_the_models_of_a_step_vary_and_samples_are_then_unknown(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(_run, str(tmp_path), generator_at_every_third_step, 30)
    for rank in range(2):
        steps = [step for event in _steps(tmp_path, rank) for step in single_steps(event)]
        assert len(steps) == 30
        assert all(step.sync_exposed_ms is not None for step in steps[12:]), "once DDP has rebuilt both models' buckets"
        assert all(step.samples is None for step in steps[4:])


class Slow(Dataset[Tensor]):
    """A batch of it takes 20 ms."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.ones(4)


def _evaluating(where: str) -> Loop:
    def evaluate(model: nn.Module) -> float:
        began = time.perf_counter()
        for batch in DataLoader(Slow(), batch_size=2):
            with torch.no_grad():
                model(batch)
        return 1e3 * (time.perf_counter() - began)

    def loop(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
        model = DDP(net())
        optimizer = sgd(model)
        losses, evaluations_ms = [], 0.0
        for number, (batch,) in enumerate(loader(rank, steps)):
            losses.append(train(model, optimizer, batch))
            if number % 2:
                model.eval()
                with torch.set_grad_enabled(where != "without gradients"):
                    evaluations_ms += evaluate(model.module if where == "of the inner model" else model)
                model.train()
        return [model], [*losses, evaluations_ms]

    return loop


def _evaluate(rank: int, world_size: int, folder: str, where: str) -> tuple[float, float]:
    _, (*_, evaluations_ms), elapsed_ms = _run(rank, world_size, folder, _evaluating(where), STEPS)
    return evaluations_ms, elapsed_ms


@pytest.mark.parametrize("where", ["of the wrapped model", "of the inner model", "without gradients"])
def test_an_evaluation_between_steps_counts_to_none(gang: Gang, tmp_path: Path, where: str) -> None:
    for rank, (evaluations_ms, elapsed_ms) in enumerate(gang.run(_evaluate, str(tmp_path), where)):
        events = _steps(tmp_path, rank)
        assert sum(event.steps for event in events) == STEPS
        assert sum((event.step_ms or 0.0) * event.steps for event in events) <= elapsed_ms - evaluations_ms


LATE_S = 0.3


def evaluating_together(rank: int, steps: int) -> tuple[list[nn.Module], list[float]]:
    """An evaluation after each second step, in which rank 1 is late, and the ranks add up their results."""
    model = DDP(net())
    optimizer = sgd(model)
    losses = []
    for number, (batch,) in enumerate(loader(rank, steps)):
        losses.append(train(model, optimizer, batch))
        if number % 2:
            model.eval()
            with torch.no_grad():
                for (data,) in loader(rank, 2):
                    model(data)
                time.sleep(LATE_S * rank)
                dist.all_reduce(torch.ones(1))
            model.train()
    return [model], losses


def test_each_ranks_own_time_in_an_evaluation_is_on_record(gang: Gang, tmp_path: Path) -> None:
    gang.run(_run, str(tmp_path), evaluating_together, STEPS)
    own_ms = []
    for rank in range(2):
        events = _steps(tmp_path, rank)
        evaluated = [event for event in events if event.evaluation_ms is not None]
        assert [(event.step, event.steps) for event in evaluated] == [(3, 1), (5, 1)], "no step follows the last one"
        assert all(event.calls is None and not event.groups for event in evaluated), "they are of no step"
        own_ms.append([event.evaluation_ms or 0.0 for event in evaluated])
    assert min(own_ms[0]) < 1e3 * LATE_S <= min(own_ms[1])


def _keep_copies(rank: int, world_size: int, folder: str) -> tuple[bool, list[str]]:
    instrument.install(Path(folder, f"{rank}.ndjson"), rank)
    model = DDP(net())
    optimizer = sgd(model)
    points = loader(rank, STEPS)
    for (batch,) in points:
        train(model, optimizer, batch)
    kept = [pickle.dumps(each) for each in (model, model.state_dict(), optimizer, points, torch.autograd.backward)]
    twin = copy.deepcopy(model)
    optimizer = sgd(twin)  # in the place of the other one
    train(twin, optimizer, torch.ones(BATCH, 4))
    instrument.finish()
    signatures = [str(inspect.signature(each)) for each in (DDP.__init__, DDP.register_comm_hook, Tensor.backward)]
    return any(b"trainer" in each for each in kept), signatures


def test_models_optimizers_and_loaders_can_be_copied_and_hold_nothing_of_ours(gang: Gang, tmp_path: Path) -> None:
    own = [str(inspect.signature(each)) for each in (DDP.__init__, DDP.register_comm_hook, Tensor.backward)]
    assert gang.run(_keep_copies, str(tmp_path)) == [(False, own)] * 2
    assert sum(event.steps for event in _steps(tmp_path, 0)) == STEPS + 1
