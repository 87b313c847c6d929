"""Collectives that a script calls itself, on record by group; whatever the script does, it sees no difference."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_group import Gang
from torch import Tensor, nn

from trainer.contract.record import CollectiveGroup, Finding, RunDir, Step, decode_events
from trainer.telemetry import instrument

WORLD = 2
STEPS = 4
Extra = Callable[[int, int], Any]
"""Called in each step with rank and step, between backward pass and optimizer; its result is compared."""


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(WORLD)
    yield gang
    gang.close()


def _run(rank: int, world_size: int, folder: str | None, extra: Extra, steps: int = STEPS) -> list[Any]:
    """Train with own collectives, measured into a folder or not; return all that the script sees."""
    torch.manual_seed(rank)
    if folder is not None:
        instrument.install(Path(folder, f"{rank}.ndjson"), rank)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    try:
        for step in range(steps):
            loss = model(torch.full((2, 4), step + rank + 1.0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            seen.append(extra(rank, step))
            optimizer.step()
    finally:
        instrument.finish()
    return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]


def _events(folder: Path, rank: int) -> list[Any]:
    return list(decode_events(Path(folder, f"{rank}.ndjson").read_bytes()))


def _groups(folder: Path, rank: int) -> dict[str, dict[str, float]]:
    """Return the number of calls in all steps, by group and operation."""
    found: dict[str, dict[str, float]] = {}
    for event in _events(folder, rank):
        for group in (event.groups or ()) if isinstance(event, Step) else ():
            operations = found.setdefault(group.group, {})
            for operation, calls in group.operations.items():
                operations[operation] = operations.get(operation, 0.0) + calls * event.steps
    return {name: {key: round(calls, 2) for key, calls in group.items()} for name, group in found.items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


# ------------------------------------------------------------------------------------------------ what a script does


def every_operation(rank: int, step: int) -> Any:
    ones = torch.full((4,), rank + 1.0)
    summed = ones.clone()
    dist.all_reduce(summed)
    work: Any = dist.all_reduce(doubled := ones.clone(), async_op=True)
    kind = type(work).__name__, work.wait()
    parts = [torch.empty(4) for _ in range(WORLD)]
    dist.all_gather(parts, ones)
    gathered = torch.empty(4 * WORLD)
    dist.all_gather_into_tensor(gathered, ones)
    dist.broadcast(sent := ones.clone(), src=0)
    dist.reduce(reduced := ones.clone(), dst=0)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, ones)
    dist.scatter(got := torch.empty(4), [ones, ones] if rank == 0 else None, src=0)
    dist.gather(ones, [torch.empty(4) for _ in range(WORLD)] if rank == 0 else None, dst=0)
    exchanged = torch.empty(4)
    dist.all_to_all_single(exchanged, ones)
    received = torch.empty(4)
    if rank == 0:
        dist.send(ones, dst=1)
        dist.recv(received, src=1)
    else:
        dist.recv(received, src=0)
        dist.send(ones, dst=0)
    operations = [dist.P2POp(dist.isend, ones, 1 - rank), dist.P2POp(dist.irecv, back := torch.empty(4), 1 - rank)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return [
        summed, doubled, kind, parts, gathered, sent, reduced if rank == 0 else 0, scattered, got, exchanged, received,
        back,
    ]  # fmt: skip


def futures(rank: int, step: int) -> Any:
    """Works whose futures are waited for: of one, of what follows it, and of several together."""
    ones = [torch.full((4,), rank + 1.0) for _ in range(5)]
    made = [dist.all_reduce(each, async_op=True).get_future() for each in ones]  # type: ignore[union-attr]
    made[0].wait()
    halves = made[1].then(lambda future: future.value()[0] / 2).wait()
    together = torch.futures.collect_all(made[2:4]).wait()
    return [ones, halves, [each.value()[0] for each in together], torch.futures.wait_all(made[4:])]


def functional(rank: int, step: int) -> Any:
    import torch.distributed._functional_collectives as functions

    ones = torch.full((2, 2), rank + 1.0)
    summed = functions.all_reduce(ones, "sum", dist.group.WORLD)
    kind = type(summed).__name__
    gathered = functions.all_gather_tensor(ones, 1, dist.group.WORLD)
    scattered = functions.reduce_scatter_tensor(ones, "sum", 0, dist.group.WORLD)
    return [kind, summed + 0, gathered + 0, scattered + 0]


def objects(rank: int, step: int) -> Any:
    found: list[Any] = [None] * WORLD
    try:
        dist.all_gather_object(found, {"rank": rank})
    except RuntimeError as error:  # torch needs numpy for it
        return str(error)
    return found


def raising(rank: int, step: int) -> Any:
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG)
    except RuntimeError as error:
        return type(error).__name__, str(error).split("\n", 1)[0][:60]
    return "passed"


def groups_of_many_kinds(rank: int, step: int) -> Any:
    """Groups of one, groups that are destroyed and made again in each step, and two of equal name."""
    ones = torch.ones(2)
    for group in [dist.new_group([member]) for member in range(WORLD)]:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(ones, group=group)
    dist.all_reduce(ones)
    for description in ("pair", "pair", "other pair"):
        group = dist.new_group([0, 1], group_desc=description)
        dist.all_reduce(ones, group=group)
        dist.destroy_process_group(group)
    return ones


made_worlds = itertools.count()
"""Equal on all ranks, which make theirs together; a name is not used twice in a store."""


def world_made_again(rank: int, step: int) -> Any:
    """The script destroys the group of all ranks and makes another one in each step."""
    dist.all_reduce(ones := torch.ones(2))
    store = dist.PrefixStore(f"made {next(made_worlds)}", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    dist.all_reduce(ones)
    return ones


def other_threads(rank: int, step: int) -> Any:
    ones = torch.ones(2)
    thread = threading.Thread(target=dist.all_reduce, args=(ones,))
    thread.start()
    thread.join()
    return ones


def replaced_functions(rank: int, step: int) -> Any:
    """The script has its own ``all_reduce``, as a compressing one, and keeps the name that it imported."""
    original = dist.all_reduce

    def own(tensor: Tensor) -> None:
        original(tensor)
        tensor /= WORLD

    dist.all_reduce = own
    try:
        dist.all_reduce(ones := torch.full((2,), rank + 1.0))
    finally:
        dist.all_reduce = original
    return ones


def compiled(rank: int, step: int) -> Any:
    import torch.distributed._functional_collectives as functions

    def summed(values: Tensor) -> Tensor:
        total: Tensor = functions.all_reduce(values * 2, "sum", "0") + 1
        return total

    torch._dynamo.reset()
    return torch.compile(summed, backend="eager", fullgraph=True)(torch.ones(2))


def sparse(rank: int, step: int) -> Any:
    dist.all_reduce(ones := torch.eye(3).to_sparse())
    return ones.to_dense()


FOUR = float(STEPS)
SCRIPTS: dict[Extra, dict[str, dict[str, float]]] = {
    every_operation: {
        "world": {
            "all_reduce": 2 * FOUR, "all_gather": 2 * FOUR, "broadcast": FOUR, "reduce": FOUR, "reduce_scatter": FOUR,
            "scatter": FOUR, "gather": FOUR, "all_to_all": FOUR, "send": 2 * FOUR, "recv": 2 * FOUR,
            "barrier": 2 * FOUR,
        }
    },
    futures: {"world": {"all_reduce": 5 * FOUR}},
    functional: {"world": {"all_reduce": FOUR, "all_gather": FOUR, "reduce_scatter": FOUR}},
    objects: {"world": {"all_gather_object": FOUR}},
    raising: {"world": {"all_reduce": FOUR}},
    groups_of_many_kinds: {
        "world": {"all_reduce": FOUR},
        "pair": {"all_reduce": 2 * FOUR},
        "other pair": {"all_reduce": FOUR},
    },
    world_made_again: {"world": {"all_reduce": 2 * FOUR}},
    other_threads: {},
    replaced_functions: {"world": {"all_reduce": FOUR}},
    sparse: {"world": {"all_reduce": FOUR}},
    compiled: {},
}  # fmt: skip
"""What a script does, and the calls on record, by group and operation."""


@pytest.mark.parametrize(
    "extra",
    # Importing the compiler takes seconds.
    [pytest.param(each, id=each.__name__, marks=[pytest.mark.slow] * (each is compiled)) for each in SCRIPTS],
)
def test_collectives_are_on_record_by_group_and_the_script_sees_no_difference(
    gang: Gang, tmp_path: Path, extra: Extra
) -> None:
    measured, alone = gang.run(_run, str(tmp_path), extra), gang.run(_run, None, extra)
    assert _equal(measured, alone)
    for rank in range(WORLD):
        assert _groups(tmp_path, rank) == SCRIPTS[extra]
        steps = [event for event in _events(tmp_path, rank) if isinstance(event, Step)]
        assert all((event.sync_exposed_ms is not None) == bool(SCRIPTS[extra]) for event in steps)
        named = {event.name: event.ranks for event in _events(tmp_path, rank) if isinstance(event, CollectiveGroup)}
        assert named == {name: [0, 1] for name in SCRIPTS[extra]}


def _run_watched(rank: int, world_size: int, folder: str, extra: Extra) -> None:
    from trainer.watch import watch

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, environ={"GPUTRAIN_RUN_DIR": folder}) as watched:
        for step in range(STEPS):
            loss = model(torch.full((2, 4), step + 1.0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            extra(rank, step)
            watched.report(loss=loss)
            optimizer.step()
    extra(rank, STEPS)


@pytest.mark.parametrize("extra", [every_operation, functional])
def test_watch_follows_the_collectives_alike(gang: Gang, tmp_path: Path, extra: Extra) -> None:
    gang.run(_run_watched, str(tmp_path), extra)
    for rank in range(WORLD):
        assert _groups(RunDir(tmp_path).rank_events(rank).parent, rank) == SCRIPTS[extra]


def timed(rank: int, step: int) -> Any:
    """The second rank comes 40 ms later; the times of waiting, measured by the script."""
    if rank == 1:
        time.sleep(0.04)
    ones = torch.ones(2)
    begin = time.perf_counter()
    dist.all_reduce(ones)
    work: Any = dist.all_reduce(ones, async_op=True)
    blocked = time.perf_counter() - begin
    time.sleep(0.01 * rank)
    begin = time.perf_counter()
    work.wait()
    return 1e3 * (blocked + time.perf_counter() - begin)


def timed_by_future(rank: int, step: int) -> Any:
    """The same, of two works of which the futures are waited for together."""
    if rank == 1:
        time.sleep(0.04)
    works: list[Any] = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
    begin = time.perf_counter()
    torch.futures.collect_all([work.get_future() for work in works]).wait()
    return 1e3 * (time.perf_counter() - begin)


@pytest.mark.timing
@pytest.mark.parametrize("timer", [timed, timed_by_future])
def test_waits_are_those_of_a_timer_around_them_and_the_late_rank_has_its_own_time(
    gang: Gang, tmp_path: Path, timer: Extra
) -> None:
    steps = 11
    waited_ms = gang.run(_run, str(tmp_path), timer, steps)[0][:steps]
    exposed_ms = [
        ms
        for event in _events(tmp_path, 0)
        if isinstance(event, Step)
        for ms in event.sync_exposed_ms_each or [event.sync_exposed_ms]
    ]
    # The median of the steps: between readings of the two clocks the thread may lose its core, in any of them.
    assert median(abs(ours - theirs) / theirs for ours, theirs in zip(exposed_ms, waited_ms, strict=True)) < 0.1
    own_ms = [
        sum(
            event.steps * (event.step_ms - event.sync_exposed_ms)
            for event in _events(tmp_path, rank)
            if isinstance(event, Step)
        )
        for rank in range(WORLD)
    ]
    assert own_ms[1] > own_ms[0] + steps * 30.0, "who waits is not who is late"


def _run_another_torch(rank: int, world_size: int, folder: str) -> list[Any]:
    """Train with a torch one of whose functions has other arguments than those that are known."""
    import torch.distributed._functional_collectives as functions

    def all_reduce(values: Tensor) -> Tensor:
        return values

    original = functions.all_reduce
    all_reduce.__module__ = original.__module__
    functions.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        return _run(rank, world_size, folder, replaced_functions)
    finally:
        functions.all_reduce = original


def test_with_an_unknown_torch_all_but_the_collectives_is_measured_and_the_record_says_why(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(_run_another_torch, str(tmp_path))
    steps = [event for event in _events(tmp_path, 0) if isinstance(event, Step)]
    assert sum(event.steps for event in steps) == STEPS
    assert all((event.groups, event.sync_exposed_ms) == (None, None) and event.backward_ms for event in steps)
    (found,) = [event for event in _events(tmp_path, 0) if isinstance(event, Finding)]
    assert found.kind == "not_measured"
    assert found.message.startswith("collectives are no longer measured: ValueError: ")
