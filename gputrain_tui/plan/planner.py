"""Pure: a recipe and what is known of the machines become one command per node.

Nobody types ranks or world sizes: they follow from the nodes. The flags of several nodes are those that HetSeq
documents, in its order, so that a plan can be read beside its documentation and typed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gputrain_tui.hosts.host_names import DEFAULT_PORT, THIS_MACHINE, LocalFacts, address_of, is_local, is_loopback
from trainer.contract.errors import RequestError, quoted
from trainer.contract.options import Distributed
from trainer.contract.record.events import Rank, WorldSize
from trainer.contract.schema import to_flags

if TYPE_CHECKING:
    from gputrain_tui.hosts.devices import NodeDevices
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.recipe.model import Recipe


class PlannedNode(msgspec.Struct, kw_only=True):
    """What one node does."""

    node: Rank
    """Index in the plan, from 0."""
    host: str
    first_rank: Rank
    ranks: list[Rank]
    """Global ranks, consecutive from ``first_rank``."""
    devices: list[int | str]
    """One per rank: a GPU's index or UUID, or ``cpu``."""
    argv: list[str]
    env: dict[str, str]
    """What the command's environment has besides what is there."""


class Plan(msgspec.Struct, kw_only=True):
    """One run on all its nodes."""

    world_size: WorldSize
    init_method: str | None
    """Where the ranks meet; None for a single rank."""
    backend: Literal["nccl", "gloo"]
    launcher: Literal["local", "ssh", "slurm"]
    nodes: list[PlannedNode]


def plan(recipe: Recipe, inventories: Mapping[str, Inventory], *, local: LocalFacts) -> Plan:
    """Compute what every node has to run.

    Args:
        recipe: what was asked for.
        inventories: by host as the recipe names it, ``localhost`` for this machine. A machine that is missing here
            is believed to have the GPUs that the recipe counts or lists.
        local: facts about this machine.

    Raises:
        RequestError: the machines cannot do what the recipe asks for, or it contradicts itself.
    """
    from gputrain_tui.hosts.devices import DeviceAllocator

    allocator = DeviceAllocator(
        inventories, share=recipe.launch.share_devices, cuda_visible_devices=local.cuda_visible_devices
    )
    machines, shares = [], []
    for index, node in enumerate(recipe.cluster.nodes):
        machine = THIS_MACHINE if is_local(node.host, local) else str(node.host)
        key = next((key for key in ("gpus", "cpu_ranks", "ranks") if getattr(node, key) is not None), None)
        where = recipe.where("cluster", "nodes", index, key) if key else recipe.source
        shown = "this machine" if machine == THIS_MACHINE else machine
        machines.append(machine)
        shares.append(allocator.allocate(machine, shown, node, where=where))
    world_size = sum(len(share.devices) for share in shares)
    _check_batch_size(recipe, world_size)
    init_method = _init_method(recipe, machines, world_size, local)
    backend = _backend(recipe, shares)
    alike_on_all_nodes = [*to_flags(recipe.launch), *_training_flags(recipe)]
    nodes: list[PlannedNode] = []
    first_rank = 0
    for index, (machine, share) in enumerate(zip(machines, shares, strict=True)):
        ranks = list(range(first_rank, first_rank + len(share.devices)))
        flags = _distributed_flags(recipe, share, init_method, world_size, first_rank, len(shares), backend)
        nodes.append(
            PlannedNode(
                node=index,
                host=recipe.cluster.nodes[index].host or THIS_MACHINE,
                first_rank=first_rank,
                ranks=ranks,
                devices=list(share.devices),
                argv=[
                    local.python if machine == THIS_MACHINE else "python",
                    *("-m", "trainer"),
                    *flags,
                    *alike_on_all_nodes,
                ],
                env=_environment(recipe, share, init_method, machines, local),
            )
        )
        first_rank += len(ranks)
    return Plan(
        world_size=world_size,
        init_method=init_method,
        backend=backend,
        launcher=_launcher(recipe, machines, local),
        nodes=nodes,
    )


def with_run_dir(plan: Plan, run_dir: str) -> Plan:
    """Return the plan of a run that is recorded in a directory."""
    nodes = [
        msgspec.structs.replace(node, argv=with_flags(node.argv, "--run-dir", run_dir, "--node", str(node.node)))
        for node in plan.nodes
    ]
    return msgspec.structs.replace(plan, nodes=nodes)


def stop_grace(argv: Sequence[str]) -> float:
    """Return how many seconds the ranks of a command have to answer a stop request."""
    flag = "--stop-grace"
    ours = argv[: argv.index("--")] if "--" in argv else argv
    return float(ours[ours.index(flag) + 1]) if flag in ours else Distributed().stop_grace


def with_flags(argv: Sequence[str], *flags: str) -> list[str]:
    """Return a command with more flags for the trainer, before the arguments of a script."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:end], *flags, *argv[end:]]


def _training_flags(recipe: Recipe) -> list[str]:
    if recipe.script is None:
        return [*to_flags(recipe.train), *task_flags(recipe.task_options)]
    arguments = recipe.script.args
    return ["--script", recipe.script.script, *(["--", *arguments] if arguments else [])]


def task_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of a task's own options, every one that the recipe names."""
    # Each is a field without a default, so that to_flags says it in the way that read_flags reads it.
    kinds: dict[type, Any] = {list: list[str], tuple: list[str], type(None): str | None}
    schema: Any = msgspec.defstruct(
        "TaskOptions", [(name, kinds.get(type(value), type(value))) for name, value in options.items()], kw_only=True
    )
    return to_flags(schema(**options))


def _distributed_flags(
    recipe: Recipe,
    share: NodeDevices,
    init_method: str | None,
    world_size: int,
    first_rank: int,
    nodes: int,
    backend: str,
) -> list[str]:
    here = len(share.devices)
    words = ["--distributed-init-method", init_method] if init_method is not None else []
    words += ["--distributed-world-size", str(world_size)]
    if world_size > 1:
        words += ["--distributed-gpus", str(here)]
    if nodes > 1:
        words += ["--distributed-rank", str(first_rank)]
    natural = "gloo" if share.cpu or share.shared else "nccl"
    if recipe.cluster.backend != "auto" or backend != natural:
        words += ["--distributed-backend", backend]
    if here == 1 and world_size > 1:
        words.append("--distributed-no-spawn")
    if here == 1 and not share.cpu:
        words += ["--device-id", "0"]
    return [*words, "--cpu"] if share.cpu else words


def _check_batch_size(recipe: Recipe, world_size: int) -> None:
    given = len(recipe.train.batch_size)
    if given not in (1, world_size):
        raise RequestError(
            f"{recipe.where('train', 'batch_size')} has {given} values, but the run has "
            f"{world_size} rank{'s' if world_size > 1 else ''}: give one value, or one per rank"
        )


def _init_method(recipe: Recipe, machines: Sequence[str], world_size: int, local: LocalFacts) -> str | None:
    asked = recipe.cluster.init_method
    where = recipe.where("cluster", "init_method")
    several = len(set(machines)) > 1
    if world_size == 1:
        if asked != "auto":
            raise RequestError(
                f"{where} is {quoted(asked)}, but the run has a single rank, which meets nobody; remove it"
            )
        return None
    if recipe.script is not None and asked.startswith("file://"):
        raise RequestError(
            f"{where} is {quoted(asked)}, "
            "but a script meets at MASTER_ADDR and MASTER_PORT: use tcp://HOST:PORT or auto"
        )
    if several:
        _refuse_loopback(recipe, machines, local)
    if asked.startswith("tcp://"):
        if several and is_loopback(_host_of(asked)):
            raise RequestError(
                f"{where} is {quoted(asked)}, which the other nodes cannot reach: name an address of the first node"
            )
        return asked.rstrip("/")
    if asked != "auto":
        return asked
    host, port = _meeting_point(recipe, machines, local)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _meeting_point(recipe: Recipe, machines: Sequence[str], local: LocalFacts) -> tuple[str, int]:
    """Address and port at which rank 0 listens when the recipe leaves it open."""
    if len(set(machines)) == 1:
        here = machines[0] == THIS_MACHINE
        return "127.0.0.1", recipe.cluster.port or (local.free_port if here else DEFAULT_PORT)
    host = recipe.cluster.nodes[0].host
    assert host is not None
    return address_of(host), recipe.cluster.port or DEFAULT_PORT


def _host_of(url: str) -> str:
    return url.removeprefix("tcp://").rpartition(":")[0]


def _refuse_loopback(recipe: Recipe, machines: Sequence[str], local: LocalFacts) -> None:
    """Nodes on several machines must be named so that every one of them means the same by it."""
    other = next(machine for machine in machines if machine != machines[0])
    for index, node in enumerate(recipe.cluster.nodes):
        if node.host is None and index > 0:
            continue
        if node.host is None or is_loopback(node.host):
            known = f", such as {local.addresses[0]}" if local.addresses else ""
            found = f"is {quoted(node.host)}" if node.host else "is missing"
            away = other if index == 0 else machines[0]
            raise RequestError(
                f"{recipe.where('cluster', 'nodes', index, 'host')} {found}, which the other node {away} cannot reach: "
                f"give this machine's address{known}"
            )


def _backend(recipe: Recipe, shares: Sequence[NodeDevices]) -> Literal["nccl", "gloo"]:
    asked, where = recipe.cluster.backend, recipe.where("cluster", "backend")
    on_cpu = next((index for index, share in enumerate(shares) if share.cpu), None)
    on_shared = next((index for index, share in enumerate(shares) if share.shared), None)
    if asked == "nccl" and on_cpu is not None:
        raise RequestError(f"{where} is 'nccl', but the ranks of node {on_cpu} run on the CPU: use gloo or auto")
    if asked == "nccl" and on_shared is not None:
        raise RequestError(f"{where} is 'nccl', which refuses two ranks on one GPU as on node {on_shared}: use gloo")
    if asked != "auto":
        return asked
    return "nccl" if on_cpu is None and on_shared is None else "gloo"


def _launcher(recipe: Recipe, machines: Sequence[str], local: LocalFacts) -> Literal["local", "ssh", "slurm"]:
    asked = recipe.cluster.launcher
    away = next((machine for machine in machines if machine != THIS_MACHINE), None)
    if asked == "local" and away is not None:
        raise RequestError(
            f"{recipe.where('cluster', 'launcher')} is 'local', but {away} is another machine: use ssh, slurm or auto"
        )
    if asked != "auto":
        return asked
    if away is None:
        return "local"
    return "slurm" if local.slurm else "ssh"


def _environment(
    recipe: Recipe, share: NodeDevices, init_method: str | None, machines: Sequence[str], local: LocalFacts
) -> dict[str, str]:
    env: dict[str, str] = {}
    if init_method == "env://":
        host, port = _meeting_point(recipe, machines, local)
        env |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if share.visible:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in share.visible)
    return env
