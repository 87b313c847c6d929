"""Dispatch in a Slurm step, from its environment without ``scontrol``: also uneven nodes and heterogeneous jobs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.contract.rendezvous_url import tcp_url
from trainer.environments.decision import (
    CountExchange,
    Decision,
    decide_node,
    decide_rank,
    parse_integer,
    require_devices,
)

FIRST_DERIVED_PORT, DERIVED_PORT_PAIRS = 12_000, 9_000
"""Derived ports are pairs from 12000 to 29999, below Linux's ephemeral ports (32768 on)."""

STEP_KEY_VARIABLES = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_JOB_UID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_LAUNCHER_PORT",
)
"""Variables that are equal in all tasks of a step. Unless PrivateData hides jobs, other users can query all of them
from Slurm except the last one, srun's own port."""

TOTAL_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
"""Variables with the number of tasks, the step's first."""


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a parallel step, and not a batch script or a salloc shell."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    # Lowest reserved step id (slurm.h), of batch scripts and interactive shells, which are no parallel steps.
    first_special_step = 0xFFFF_FFF0
    return step.isdecimal() and int(step) < first_special_step


def is_requeued(environ: Mapping[str, str]) -> bool:
    """Whether Slurm has requeued this job, after the loss of a node or a pre-emption."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    return count.isdecimal() and int(count) > 0


def decide(options: Distributed, environ: Mapping[str, str], device_count: int) -> Decision:
    """Decide for one task of a step: with one task per node it starts the node's ranks, otherwise it is a rank.

    Raises:
        RequestError: the variables are incomplete, or contradict each other, the flags or the machine.
    """
    if options.distributed_rank > 0:
        raise RequestError("--distributed-rank is set by Slurm: leave it out, or give --distributed-init-method")
    if environ.get("SLURM_HET_SIZE"):
        # The variables of a heterogeneous job cover one component; ranks are numbered across all components.
        return _task_per_rank(options, environ, device_count, tasks=None)
    nodes = _count(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    node = _required(environ, "SLURM_NODEID")
    if node >= nodes:
        raise RequestError(f"Slurm's SLURM_NODEID is {node}, but the step has {nodes} nodes, from 0 to {nodes - 1}")
    tasks = _tasks(environ, nodes)
    if sum(tasks) == nodes and not options.distributed_no_spawn:
        return _task_per_node(options, environ, device_count, nodes, node)
    return _task_per_rank(options, environ, device_count, tasks)


def _tasks(environ: Mapping[str, str], nodes: int) -> list[int]:
    """Return the number of tasks on each node; the step's variables go before the job's, which may have more nodes."""
    total = _count(environ, *TOTAL_TASKS, default=0)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    per_node = environ.get("SLURM_NTASKS_PER_NODE")
    if text:
        counts = task_counts(text)
    elif per_node:
        counts = [parse_integer("SLURM_NTASKS_PER_NODE", per_node, low=1)] * nodes
    elif total and total % nodes == 0:
        counts = [total // nodes] * nodes
    elif total:
        raise RequestError(
            f"Slurm has {total} tasks on {nodes} nodes, but gives no number of tasks per node: "
            "start srun with --ntasks-per-node, or with a multiple of the nodes"
        )
    else:
        raise RequestError("the environment has SLURM_STEP_ID, but neither SLURM_NTASKS nor SLURM_TASKS_PER_NODE")
    if len(counts) != nodes or (total and sum(counts) != total):
        raise RequestError(
            f"Slurm's variables contradict each other: tasks per node {text or per_node!r} for {nodes} nodes"
            + (f" and {total} tasks" if total else "")
        )
    return counts


def _task_per_rank(
    options: Distributed, environ: Mapping[str, str], device_count: int, tasks: list[int] | None
) -> Decision:
    """Decide for a step in which each task is a rank; ``tasks`` of each node are unknown in a heterogeneous job."""
    world = sum(tasks) if tasks is not None else _count(environ, *TOTAL_TASKS)
    rank, local_rank = _required(environ, "SLURM_PROCID"), _required(environ, "SLURM_LOCALID")
    local_world = tasks[_required(environ, "SLURM_NODEID")] if tasks is not None else local_rank + 1
    if rank >= world or local_rank >= local_world:
        raise RequestError(
            f"Slurm's variables contradict each other: task {rank} of {world}, number {local_rank} of the "
            f"{local_world} on its node"
        )
    if options.distributed_world_size not in (None, world):
        raise RequestError(
            f"--distributed-world-size is {options.distributed_world_size}, but each of the {world} tasks that the "
            "Slurm step has is a rank: leave the flag out, or start one task per node"
        )
    # Checked for all nodes, not only this one: if one node alone refused, the others would wait for it.
    if tasks is not None and options.distributed_gpus is not None and set(tasks) != {options.distributed_gpus}:
        counts = ", ".join(map(str, tasks[:8])) + (", ..." if len(tasks) > 8 else "")
        raise RequestError(
            f"--distributed-gpus is {options.distributed_gpus}, but each of the {counts} tasks that Slurm started on "
            "its nodes is a rank: leave the flag out, or start one task per node"
        )
    require_devices(options, device_count, world)
    # With --gpus-per-task each task sees only its own GPU, as number 0; otherwise every task sees all GPUs of the node.
    # If one GPU is visible, SLURM_GPUS_ON_NODE distinguishes the two.
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    single_node = tasks is not None and len(tasks) == 1
    return decide_rank(
        "slurm",
        options,
        device_count,
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        init_method=_init_method(options, environ, single_node=single_node) if world > 1 else None,
        why=f"rank {rank} of {world}: task {local_rank} of its node in a Slurm step",
        own_device=not (on_node.isdecimal() and int(on_node) < local_world),
    )


def _task_per_node(
    options: Distributed, environ: Mapping[str, str], device_count: int, nodes: int, node: int
) -> Decision:
    world = options.distributed_world_size
    nprocs = options.distributed_gpus
    per_node = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    nodes_alike = nprocs is not None or nodes == 1 or device_count == 0 or per_node == str(device_count)
    if nprocs is None:
        if device_count == 0 and world is not None and world % nodes:
            raise RequestError(
                f"--distributed-world-size {world} cannot be divided evenly over the {nodes} nodes of the Slurm step"
            )
        nprocs = device_count or (world or nodes) // nodes
        if device_count and nodes == 1:
            nprocs = world or device_count
        if options.device_id is not None and device_count:
            nprocs, nodes_alike = 1, True
    if nodes_alike and world not in (None, nprocs * nodes):
        raise RequestError(
            f"--distributed-world-size is {world}, but the Slurm step has {nodes} x {nprocs} = {nprocs * nodes} ranks: "
            "nodes x ranks per node"
        )
    require_devices(options, device_count, max(nprocs * nodes, world or 1))
    exchange = None
    if not nodes_alike:
        exchange = CountExchange(
            node=node,
            nodes=nodes,
            host=_first_host(environ),
            port=_neighbouring_port(_port(options, environ)),
            expected_world=world,
            key=step_key(environ),
        )
    return decide_node(
        "slurm",
        options,
        device_count,
        world=nprocs * nodes,
        first=nprocs * node,
        count=nprocs,
        init_method=_init_method(options, environ, single_node=nodes == 1) if nprocs * nodes > 1 else None,
        why=f"node {node} of {nodes} of a Slurm step, one task per node",
        exchange=exchange,
    )


# --- the init method ------------------------------------------------------------------------------------------------


def _init_method(options: Distributed, environ: Mapping[str, str], *, single_node: bool) -> str:
    host = "127.0.0.1" if single_node else _first_host(environ)
    return tcp_url(host, _port(options, environ))


def _first_host(environ: Mapping[str, str]) -> str:
    """Return the first node of the step; not SLURM_LAUNCH_NODE_IPADDR, srun's host, which may be a login node."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not hosts:
        raise RequestError(
            "the environment has SLURM_STEP_ID, but no SLURM_STEP_NODELIST: give --distributed-init-method"
        )
    return expand(hosts)[0]


def _port(options: Distributed, environ: Mapping[str, str]) -> int:
    """Return a port derived from job and step id: equal on all nodes without communication, differing between steps."""
    if options.distributed_port is not None:
        return options.distributed_port
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        raise RequestError("the environment has SLURM_STEP_ID, but no SLURM_JOB_ID: give --distributed-port")
    step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
    spread = parse_integer("SLURM_JOB_ID", job) * 101 + int(step)
    return FIRST_DERIVED_PORT + 2 * (spread % DERIVED_PORT_PAIRS)


def _neighbouring_port(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def step_key(environ: Mapping[str, str]) -> str:
    """Return a text that only tasks of this step have in common; hard to guess, but not secret."""
    return "\n".join(f"{name}={environ.get(name, '')}" for name in STEP_KEY_VARIABLES)


def _count(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if environ.get(name):
            return parse_integer(name, environ[name], low=1)
    if default is None:
        raise RequestError(f"the environment has SLURM_STEP_ID, but none of {', '.join(names)}")
    return default


def _required(environ: Mapping[str, str], name: str) -> int:
    if not environ.get(name):
        raise RequestError(f"the environment has SLURM_STEP_ID, but no {name}")
    return parse_integer(name, environ[name])


MAX_HOSTS = 100_000
"""Maximum hosts of a list, more than any cluster has: a longer range is a typo."""


def expand(hostlist: str) -> list[str]:
    """Expand ``n[1-2,5],gpu[01-03]`` to its host names, in order; keep leading zeros.

    Raises:
        RequestError: the text is not a host list.
    """
    hosts: list[str] = []
    for entry in _split(hostlist):
        parts = re.split(r"\[([^\[\]]*)\]", entry)
        if any(bracket in text for text in parts[::2] for bracket in "[]"):
            raise RequestError(f"host list {hostlist!r} has an unmatched bracket")
        # re.split alternates plain text and the content of brackets.
        choices = [[part] if index % 2 == 0 else _numbers(part, hostlist) for index, part in enumerate(parts)]
        hosts += ["".join(combination) for combination in itertools.product(*choices)]
        if len(hosts) > MAX_HOSTS:
            raise RequestError(f"host list {hostlist!r} names more than {MAX_HOSTS} hosts")
    if not hosts:
        raise RequestError("the host list is empty")
    return hosts


def _split(hostlist: str) -> list[str]:
    return [entry.strip() for entry in re.split(r",(?![^\[]*\])", hostlist) if entry.strip()]


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        low, dash, high = item.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise RequestError(f"host list {hostlist!r} has {item.strip()!r} instead of a number or a range")
        count = int(high or low) - int(low) + 1
        if count > MAX_HOSTS:
            raise RequestError(f"host list {hostlist!r} names more than {MAX_HOSTS} hosts")
        numbers += [str(int(low) + offset).zfill(len(low)) for offset in range(count)]
    return numbers


def task_counts(text: str) -> list[int]:
    """Expand ``4(x2),2`` to ``[4, 4, 2]``: the tasks of each node, in the order of the host list.

    Raises:
        RequestError: the text is not a list of task counts.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\(x(\d+)\))?\s*", item)
        if match is None or int(match[2] or 1) > MAX_HOSTS:
            raise RequestError(f"tasks per node {text!r} should look like '4(x2),2'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
