"""Pure: computes one command per node from a recipe and the inventories of its machines; a plan as shell commands.

Ranks and world size are never input: they follow from the nodes. The flags are HetSeq's, in the order of its
documentation, so that a plan can be compared with it and typed by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gputrain_tui.hosts.host_names import DEFAULT_PORT, PENDING_HOST, THIS_MACHINE, LocalFacts, address_of, is_local
from gputrain_tui.shell_words import shell_joined, shell_quoted
from gputrain_tui.tables import printable
from trainer.contract.backends import is_nccl
from trainer.contract.errors import RequestError, quoted
from trainer.contract.option_rules import require_ranks
from trainer.contract.options import Distributed
from trainer.contract.record.numbers import Rank, WorldSize
from trainer.contract.rendezvous_url import parse_rendezvous_url, tcp_url
from trainer.contract.schema import flags_of, to_flags
from trainer.host.addresses import is_loopback

if TYPE_CHECKING:
    from gputrain_tui.hosts.devices import NodeDevices
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.recipe.model import Recipe


INIT_FLAG = "--distributed-init-method"


class PlannedNode(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The ranks, devices and command of one node."""

    node: Rank
    host: str
    first_rank: Rank
    ranks: list[Rank]
    """Global ranks, consecutive from ``first_rank``."""
    devices: list[int | str]
    """One per rank: a GPU's index or UUID, or ``cpu``."""
    argv: list[str]
    env: dict[str, str]
    """Added to the environment of the command."""
    workdir: str = ""
    """Folder in which the command starts; empty is the one in which the run is started."""
    setup: str = ""
    """Line of shell that runs before the command, in its shell; empty for none."""


class Plan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run on all its nodes."""

    world_size: WorldSize
    init_method: str | None
    """None for a single rank."""
    backend: Literal["nccl", "gloo"]
    launcher: Literal["local", "ssh", "slurm"]
    nodes: list[PlannedNode]
    finds_port: bool = False
    """Whether the launch replaces the port of the rendezvous by one that is free on the first node's host."""


def plan(recipe: Recipe, inventories: Mapping[str, Inventory], *, local: LocalFacts) -> Plan:
    """Compute the command of every node.

    ``inventories`` are by host as in the recipe, ``localhost`` for this machine. A machine without one is assumed to
    have the GPUs that the recipe counts or lists.
    """
    from gputrain_tui.hosts.devices import DeviceAllocator

    if recipe.is_for_slurm:
        recipe = _on_slurm(recipe, local)
    allocator = DeviceAllocator(
        inventories, share=recipe.launch.share_devices, cuda_visible_devices=local.cuda_visible_devices
    )
    machines, assignments = [], []
    for index, node in enumerate(recipe.cluster.nodes):
        machine = THIS_MACHINE if is_local(node.host, local) and not recipe.is_for_slurm else str(node.host)
        key = next((key for key in ("gpus", "cpu_ranks", "ranks") if getattr(node, key) is not None), None)
        where = recipe.where("cluster", "nodes", index, key) if key else recipe.origin.name
        shown = "this machine" if machine == THIS_MACHINE else machine
        machines.append(machine)
        assignments.append(allocator.allocate(machine, shown, node, where=where))
    world_size = sum(len(assigned.devices) for assigned in assignments)
    if recipe.world_size not in (None, world_size):
        counts = " + ".join(str(len(assigned.devices)) for assigned in assignments)
        raise RequestError(
            f"{recipe.where('distributed_world_size')} is {recipe.world_size}, but cluster.nodes has {counts} = "
            f"{world_size} ranks: give the nodes {recipe.world_size}, or set it to {world_size}"
        )
    require_ranks(recipe.train, world_size, where=lambda name: recipe.where("train", name))
    run = Plan(
        world_size=world_size,
        init_method=_init_method(recipe, machines, world_size, local),
        backend=_backend(recipe, assignments),
        launcher=_launcher(recipe, machines, local),
        nodes=[],
        finds_port=world_size > 1 and recipe.cluster.port == 0 and recipe.cluster.init_method in ("auto", "env://"),
    )
    _check_spare(recipe, run, machines, local)
    _check_min_ranks(recipe, run)
    common_flags = [*to_flags(recipe.launch), *_training_flags(recipe)]
    first_rank = 0
    for index, assigned in enumerate(assignments):
        ranks = list(range(first_rank, first_rank + len(assigned.devices)))
        flags = _distributed_flags(recipe, run, assigned, first_rank, is_only=len(assignments) == 1)
        node = recipe.cluster.of_node(index)
        run.nodes.append(
            PlannedNode(
                node=index,
                host=recipe.cluster.nodes[index].host or THIS_MACHINE,
                first_rank=first_rank,
                ranks=ranks,
                devices=list(assigned.devices),
                argv=[node.python or local.python, "-P", "-m", "trainer", *flags, *common_flags],
                env={**node.env, **_environment(recipe, assigned, run.init_method, machines, local)},
                workdir=node.workdir or "",
                setup=node.setup or "",
            )
        )
        first_rank += len(ranks)
    return run


def _on_slurm(recipe: Recipe, local: LocalFacts) -> Recipe:
    """Return the recipe with a host for every node: those of the allocation in order, placeholders without one."""
    named = {node.host for node in recipe.cluster.nodes}
    free = [host for host in local.slurm_hosts if host not in named]
    nodes = []
    for index, node in enumerate(recipe.cluster.nodes):
        if node.cpu_ranks is None and not isinstance(node.gpus, int):
            where = recipe.where("cluster", "nodes", index, "gpus" if node.ranks is None else "ranks")
            raise RequestError(f"{where} must be a count of GPUs, or cpu_ranks: Slurm chooses the GPUs")
        if node.host is None and not free and local.slurm_hosts:
            have = len(local.slurm_hosts)
            where = recipe.where("cluster", "nodes")
            raise RequestError(f"{where} has {len(recipe.cluster.nodes)} nodes, but the allocation has {have}")
        host = node.host or (free.pop(0) if free else PENDING_HOST.format(index))
        nodes.append(msgspec.structs.replace(node, host=host))
    return dataclasses.replace(recipe, cluster=msgspec.structs.replace(recipe.cluster, nodes=tuple(nodes)))


def with_run_dir(plan: Plan, run_dir: str) -> Plan:
    """Return the plan with the flags that record the run in a directory."""
    nodes = [
        msgspec.structs.replace(node, argv=with_flags(node.argv, "--run-dir", run_dir, "--node", str(node.node)))
        for node in plan.nodes
    ]
    return msgspec.structs.replace(plan, nodes=nodes)


def stop_grace(argv: Sequence[str]) -> float:
    """Return ``--stop-grace`` of a command, seconds."""
    return _number(argv, "--stop-grace", Distributed().stop_grace)


def distributed_timeout(argv: Sequence[str]) -> float:
    """Return ``--distributed-timeout`` of a command, seconds."""
    return _number(argv, "--distributed-timeout", Distributed().distributed_timeout)


def _number(argv: Sequence[str], flag: str, default: float) -> float:
    own = argv[: argv.index("--")] if "--" in argv else argv  # without the arguments of a script
    return float(own[own.index(flag) + 1]) if flag in own else default


def with_flags(argv: Sequence[str], *flags: str) -> list[str]:
    """Return a command with flags inserted before the ``--`` that begins a script's arguments."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:end], *flags, *argv[end:]]


def with_flag(argv: Sequence[str], flag: str, value: str) -> list[str]:
    """Return a command with a flag's value replaced, or the flag added after the trainer's own (before ``--``)."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    if flag not in own:
        return with_flags(argv, flag, value)
    at = own.index(flag) + 1
    return [*argv[:at], value, *argv[at + 1 :]]


def rendezvous_port(plan: Plan) -> int | None:
    """Return the port at which the ranks of a plan meet; None if it names none."""
    url = parse_rendezvous_url(plan.init_method or "")
    if url is not None and url.scheme == "env":
        return int(plan.nodes[0].env.get("MASTER_PORT", "0")) or None
    return url.port if url is not None and url.scheme == "tcp" else None


def with_rendezvous(plan: Plan, *, host: str = "", port: int = 0) -> Plan:
    """Return a plan whose nodes meet at another host or port, in their commands or in MASTER_ADDR and MASTER_PORT."""
    url = parse_rendezvous_url(plan.init_method or "")
    if url is None or url.scheme == "file":
        return plan
    init_method, env = "env://", {"MASTER_ADDR": host} if host else {}
    if url.scheme == "tcp":
        init_method, env = tcp_url(host or url.host, port or url.port), {}
    elif port:
        env["MASTER_PORT"] = str(port)
    nodes = [
        msgspec.structs.replace(
            node, argv=with_flag(node.argv, INIT_FLAG, init_method), env={**node.env, **env} if env else node.env
        )
        for node in plan.nodes
    ]
    return msgspec.structs.replace(plan, init_method=init_method, nodes=nodes)


def _training_flags(recipe: Recipe) -> list[str]:
    if recipe.script is None:
        return [*to_flags(recipe.train), *task_flags(recipe.task_options)]
    arguments = recipe.script.args
    return [*to_flags(msgspec.structs.replace(recipe.script, args=())), *(["--", *arguments] if arguments else [])]


def task_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of all task options that the recipe gives."""
    return [word for name, value in options.items() for word in flags_of(name, value)]


def _distributed_flags(
    recipe: Recipe, run: Plan, assigned: NodeDevices, first_rank: int, *, is_only: bool
) -> list[str]:
    flags = [INIT_FLAG, run.init_method] if run.init_method is not None else []
    flags += ["--distributed-world-size", str(run.world_size)]
    if run.world_size > 1:
        flags += ["--distributed-gpus", str(len(assigned.devices))]
    if not is_only:
        flags += ["--distributed-rank", str(first_rank)]
    default = "gloo" if assigned.cpu or assigned.shared else "nccl"
    if recipe.cluster.backend != "auto" or run.backend != default:
        flags += ["--distributed-backend", run.backend]
    if len(assigned.devices) == 1 and run.world_size > 1:
        flags.append("--distributed-no-spawn")
    if len(assigned.devices) == 1 and not assigned.cpu:
        flags += ["--device-id", "0"]
    return [*flags, "--cpu"] if assigned.cpu else flags


def _init_method(recipe: Recipe, machines: Sequence[str], world_size: int, local: LocalFacts) -> str | None:
    wanted = recipe.cluster.init_method
    where = recipe.where("cluster", "init_method")
    several = len(set(machines)) > 1
    if world_size == 1:
        if wanted != "auto":
            raise RequestError(
                f"{where} is {quoted(wanted)}, but the run has a single rank, which needs no rendezvous; remove it"
            )
        return None
    url = parse_rendezvous_url(wanted)
    if recipe.script is not None and url is not None and url.scheme == "file":
        raise RequestError(
            f"{where} is {quoted(wanted)}, "
            "but a script's ranks meet at MASTER_ADDR and MASTER_PORT: use tcp://HOST:PORT or auto"
        )
    if several:
        _refuse_loopback(recipe, machines, local)
    if url is not None and url.scheme == "tcp":
        if several and is_loopback(url.host):
            raise RequestError(
                f"{where} is {quoted(wanted)}, which the other nodes cannot reach: name an address of the first node"
            )
        return wanted.rstrip("/")
    if wanted != "auto":
        return wanted
    host, port = _rendezvous_address(recipe, machines, local)
    return tcp_url(host, port)


def _rendezvous_address(recipe: Recipe, machines: Sequence[str], local: LocalFacts) -> tuple[str, int]:
    """Return the default address and port at which rank 0 listens."""
    if len(set(machines)) == 1:
        on_this_machine = machines[0] == THIS_MACHINE
        return "127.0.0.1", recipe.cluster.port or (local.free_port if on_this_machine else DEFAULT_PORT)
    host = recipe.cluster.nodes[0].host
    assert host is not None
    return address_of(host), recipe.cluster.port or DEFAULT_PORT


def _refuse_loopback(recipe: Recipe, machines: Sequence[str], local: LocalFacts) -> None:
    """Raise for a loopback address or a missing host where nodes on other machines must resolve it."""
    peer = next(machine for machine in machines if machine != machines[0])
    for index, node in enumerate(recipe.cluster.nodes):
        if node.host is None and index > 0:
            continue
        if node.host is None or is_loopback(address_of(node.host)):
            known = f", such as {local.address}" if local.address else ""
            away = peer if index == 0 else machines[0]
            problem = f"is missing, but the other node {away} must reach this one"
            if node.host:
                problem = f"is {quoted(node.host)}, which the other node {away} cannot reach"
            where = recipe.where("cluster", "nodes", index, "host")
            raise RequestError(f"{where} {problem}: give this machine's address{known}")


def _backend(recipe: Recipe, assignments: Sequence[NodeDevices]) -> Literal["nccl", "gloo"]:
    wanted, where = recipe.cluster.backend, recipe.where("cluster", "backend")
    on_cpu = next((index for index, assigned in enumerate(assignments) if assigned.cpu), None)
    on_shared = next((index for index, assigned in enumerate(assignments) if assigned.shared), None)
    if is_nccl(wanted) and on_cpu is not None:
        raise RequestError(f"{where} is 'nccl', but the ranks of node {on_cpu} run on the CPU: use gloo or auto")
    if is_nccl(wanted) and on_shared is not None:
        raise RequestError(f"{where} is 'nccl', which allows one rank per GPU, but node {on_shared} has more: use gloo")
    if wanted != "auto":
        return wanted
    return "nccl" if on_cpu is None and on_shared is None else "gloo"


def _launcher(recipe: Recipe, machines: Sequence[str], local: LocalFacts) -> Literal["local", "ssh", "slurm"]:
    wanted = recipe.cluster.launcher
    away = next((machine for machine in machines if machine != THIS_MACHINE), None)
    if recipe.is_for_slurm:
        return "slurm"
    if wanted == "local" and away is not None:
        raise RequestError(
            f"{recipe.where('cluster', 'launcher')} is 'local', but {away} is another machine: use ssh, slurm or auto"
        )
    if wanted != "auto":
        return wanted
    if away is None:
        return "local"
    return "slurm" if local.slurm else "ssh"


def _check_spare(recipe: Recipe, run: Plan, machines: Sequence[str], local: LocalFacts) -> None:
    """Raise for spare hosts of a run that is not started over ssh, and for this machine as one that is no spare."""
    where = recipe.where("cluster", "spare")
    if recipe.cluster.spare and run.launcher != "ssh":
        raise RequestError(f"{where} needs nodes on other hosts, started over ssh, but the launcher is {run.launcher}")
    nodes = {address_of(node.host).lower() for node in recipe.cluster.nodes if node.host is not None}
    for host in recipe.cluster.spare:
        if address_of(host).lower() in nodes:
            raise RequestError(f"{where} has {quoted(host)}, which is a node: name a host once, in nodes or in spare")
        if is_loopback(address_of(host)) or (THIS_MACHINE in machines and is_local(host, local)):
            raise RequestError(f"{where} has {quoted(host)}, which is this machine: name a host that all others reach")


def _check_min_ranks(recipe: Recipe, run: Plan) -> None:
    """Raise for a minimum of ranks that the run does not have, or where no host can be lost."""
    least, where = recipe.cluster.min_ranks, recipe.where("cluster", "min_ranks")
    if least is None:
        return
    if run.launcher != "ssh":
        raise RequestError(f"{where} needs nodes on other hosts, started over ssh, but the launcher is {run.launcher}")
    if least > run.world_size:
        raise RequestError(f"{where} is {least}, but the run has {run.world_size} ranks: give 1 to {run.world_size}")


def _environment(
    recipe: Recipe, assigned: NodeDevices, init_method: str | None, machines: Sequence[str], local: LocalFacts
) -> dict[str, str]:
    env: dict[str, str] = {}
    if init_method == "env://":
        host, port = _rendezvous_address(recipe, machines, local)
        env |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    env |= visible_devices(assigned)
    if recipe.script is not None and len(machines) > 1:
        env["GROUP_WORLD_SIZE"] = str(len(machines))  # as torchrun; a node cannot compute it where nodes are unequal
    if recipe.script is not None and recipe.cluster.max_restarts:
        env["TORCHELASTIC_MAX_RESTARTS"] = str(recipe.cluster.max_restarts)  # as torchrun
    return env


def visible_devices(assigned: NodeDevices) -> dict[str, str]:
    """Return the variables that limit the ranks of a node to its GPUs; none where the environment's value stays."""
    if not assigned.visible:
        return {}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in assigned.visible),
    }


def shell_commands(plan: Plan, *, folder: str) -> str:
    """Return the command of each node, under a comment that names the node and its ranks.

    ``folder``: that of the command which prints them; a node without one of its own starts there, as in a run.
    """
    lines = []
    for node in plan.nodes:
        ranks = f"rank{'s' if len(node.ranks) > 1 else ''} {rank_range(node.ranks)} of {plan.world_size}"
        title = f"# node {node.node}, {node.host}: {ranks}, {devices_text(node.devices)}"
        lines.append(printable(title))  # one line: the rest would run as a command
        settings = [f"{key}={shell_quoted(value)}" for key, value in node.env.items()]
        command = " ".join([*settings, shell_joined(node.argv)])
        own = node if node.workdir else msgspec.structs.replace(node, workdir=folder)
        lines.append(f"({shell_setup(own)} && {command})")
    return "\n".join(lines)


def shell_setup(node: PlannedNode) -> str:
    """Return the shell command that enters a node's folder and runs its line of setup; empty without both."""
    parts = []
    if node.workdir:
        home, slash, rest = node.workdir.partition("/")  # a quoted ~ is no home folder
        folder = f"~{slash}{shell_quoted(rest) if rest else ''}" if home == "~" else shell_quoted(node.workdir)
        parts.append(f"cd {folder}")
    if node.setup:
        parts.append(f"{{ {node.setup.strip().rstrip(';')}; }}")
    return " && ".join(parts)


def rank_range(ranks: Sequence[int]) -> str:
    """Return consecutive ranks as text: ``4–7``, or ``14`` for one."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def devices_text(devices: Sequence[int | str]) -> str:
    """Return a node's devices as text: ``CPU × 4``, ``GPU 0, 1``."""
    if devices[0] == "cpu":
        return "CPU" if len(devices) == 1 else f"CPU × {len(devices)}"
    shown = [str(name) if isinstance(name, int) else name[:12] for name in devices]
    return f"GPU {', '.join(shown)}"
