"""Reads a Slurm step's environment without ``scontrol``: uneven nodes, step before job variables, het jobs."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.contract.rendezvous_url import tcp_url
from trainer.environments.decision import (
    Decision,
    Exchange,
    check_device,
    choose_backend,
    gpus,
    integer,
    place,
    require_devices,
)
from trainer.environments.hostlist import expand, task_counts

FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Step ids from here on are batch scripts, interactive shells and the like: no tasks of a parallel step."""

FIRST_PORT, PORT_PAIRS = 12_000, 9_000
"""Derived ports are pairs below the range from which Linux takes ports for outgoing connections (32768 on)."""

STEP_FACTS = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_JOB_UID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_LAUNCHER_PORT",
)
"""Variables that srun gives every task of a step alike. All but the last, the port on which this srun listens, can be
asked of Slurm by other users, unless PrivateData hides jobs."""

TOTAL_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step; batch scripts and salloc shells have job variables only."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def decide(options: Distributed, environ: Mapping[str, str], device_count: int) -> Decision:
    """Decide for one task of a step: one task per rank starts nothing, one task per node starts the node's ranks.

    Raises:
        RequestError: the variables are incomplete, or contradict each other, the flags or the machine.
    """
    if options.distributed_rank > 0:
        raise RequestError("--distributed-rank is Slurm's to say: leave it out, or give --distributed-init-method")
    if environ.get("SLURM_HET_SIZE"):
        # The components of a heterogeneous job describe only themselves; ranks are numbered across all of them.
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
    """Tasks of each node; step variables come before the job's, which may describe a larger allocation."""
    total = _count(environ, *TOTAL_TASKS, default=0)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    per_node = environ.get("SLURM_NTASKS_PER_NODE")
    if text:
        counts = task_counts(text)
    elif per_node:
        counts = [integer("SLURM_NTASKS_PER_NODE", per_node, low=1)] * nodes
    elif total and total % nodes == 0:
        counts = [total // nodes] * nodes
    elif total:
        raise RequestError(
            f"Slurm has {total} tasks on {nodes} nodes and does not say how many on which: "
            "ask srun for --ntasks-per-node, or for a multiple of the nodes"
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
    """Each task is a rank. ``tasks`` per node; None in a heterogeneous job, where no task knows them."""
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
    # Of all nodes, not only of this one: a node that refuses alone would be waited for by the others.
    if tasks is not None and options.distributed_gpus is not None and set(tasks) != {options.distributed_gpus}:
        counts = ", ".join(map(str, tasks[:8])) + (", ..." if len(tasks) > 8 else "")
        raise RequestError(
            f"--distributed-gpus is {options.distributed_gpus}, but each of the {counts} tasks that Slurm started on "
            "its nodes is a rank: leave the flag out, or start one task per node"
        )
    require_devices(options, device_count, world)
    device, shared = _device_of_task(options, environ, device_count, local_rank, local_world)
    return Decision(
        mode="slurm",
        world_size=world,
        first_rank=rank,
        ranks=(rank,),
        local_ranks=(local_rank,),
        local_world_size=local_world,
        device_ids=(device,),
        init_method=_init_method(options, environ, alone=tasks is not None and len(tasks) == 1) if world > 1 else None,
        spawn=False,
        backend=choose_backend(options, device_count, shared=shared),
        why=f"rank {rank} of {world}: task {local_rank} of its node in a Slurm step",
    )


def _device_of_task(
    options: Distributed, environ: Mapping[str, str], device_count: int, local_rank: int, local_world: int
) -> tuple[int | None, bool]:
    """Return the GPU of a task that is a rank, and whether it is shared.

    With ``--gpus-per-task`` each task sees one GPU of its own, which is then number 0; otherwise every task sees
    all of the node's. SLURM_GPUS_ON_NODE tells one GPU of its own from the node's only one.
    """
    if device_count == 0:
        return None, False
    if options.device_id is not None:
        return check_device(options.device_id, device_count, "--device-id"), False
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    narrowed = device_count == 1 and not (on_node.isdecimal() and int(on_node) < local_world)
    if narrowed:
        return 0, False
    if local_world <= device_count:
        return local_rank, False
    if options.share_devices:
        return local_rank % device_count, True
    raise RequestError(
        f"Slurm started {local_world} tasks on this node, which has {gpus(device_count)} visible: "
        "ask srun for one task per GPU, or add --share-devices"
    )


def _task_per_node(
    options: Distributed, environ: Mapping[str, str], device_count: int, nodes: int, node: int
) -> Decision:
    world = options.distributed_world_size
    here = options.distributed_gpus
    per_node = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    alike = here is not None or nodes == 1 or device_count == 0 or per_node == str(device_count)
    if here is None:
        if device_count == 0 and world is not None and world % nodes:
            raise RequestError(
                f"--distributed-world-size {world} cannot be divided evenly over the {nodes} nodes of the Slurm step"
            )
        here = device_count or (world or nodes) // nodes
        if device_count and nodes == 1:
            here = world or device_count
        if options.device_id is not None and device_count:
            here, alike = 1, True
    if alike and world not in (None, here * nodes):
        raise RequestError(
            f"--distributed-world-size is {world}, but the Slurm step has {nodes} x {here} = {here * nodes} ranks: "
            "nodes x ranks per node"
        )
    require_devices(options, device_count, max(here * nodes, world or 1))
    if options.device_id is not None and here > 1 and device_count:
        raise RequestError(
            f"--device-id is for one rank, but {here} start here: choose their GPUs with CUDA_VISIBLE_DEVICES"
        )
    devices, shared = place(options, device_count, here)
    if options.device_id is not None and device_count:
        devices = (check_device(options.device_id, device_count, "--device-id"),)
    init_method = _init_method(options, environ, alone=nodes == 1) if here * nodes > 1 else None
    exchange = None
    if not alike:
        exchange = Exchange(
            node=node,
            nodes=nodes,
            host=_first_host(environ),
            port=_beside(_port(options, environ)),
            expected_world=world,
            key=step_key(environ),
        )
    return Decision(
        mode="slurm",
        world_size=here * nodes,
        first_rank=here * node,
        ranks=tuple(range(here * node, here * (node + 1))),
        local_ranks=tuple(range(here)),
        local_world_size=here,
        device_ids=devices,
        init_method=init_method,
        spawn=here > 1,
        backend=choose_backend(options, device_count, shared=shared),
        why=f"node {node} of {nodes} of a Slurm step, one task per node",
        exchange=exchange,
    )


# --- where the ranks meet -------------------------------------------------------------------------------------------


def _init_method(options: Distributed, environ: Mapping[str, str], *, alone: bool) -> str:
    host = "127.0.0.1" if alone else _first_host(environ)
    return tcp_url(host, _port(options, environ))


def _first_host(environ: Mapping[str, str]) -> str:
    """First node of the step. SLURM_LAUNCH_NODE_IPADDR would be where srun runs, which may be a login node."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not hosts:
        raise RequestError(
            "the environment has SLURM_STEP_ID, but no SLURM_STEP_NODELIST: give --distributed-init-method"
        )
    return expand(hosts)[0]


def _port(options: Distributed, environ: Mapping[str, str]) -> int:
    """The same port on all nodes without a word between them, and another one for another job or step."""
    if options.distributed_port is not None:
        return options.distributed_port
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        raise RequestError("the environment has SLURM_STEP_ID, but no SLURM_JOB_ID: give --distributed-port")
    step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
    spread = integer("SLURM_JOB_ID", job) * 101 + int(step)
    return FIRST_PORT + 2 * (spread % PORT_PAIRS)


def _beside(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def step_key(environ: Mapping[str, str]) -> str:
    """Return what the tasks of a step share, to tell them from all others; hard to come by, but no secret."""
    return "\n".join(f"{name}={environ.get(name, '')}" for name in STEP_FACTS)


def _count(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if environ.get(name):
            return integer(name, environ[name], low=1)
    if default is None:
        raise RequestError(f"the environment has SLURM_STEP_ID, but none of {', '.join(names)}")
    return default


def _required(environ: Mapping[str, str], name: str) -> int:
    if not environ.get(name):
        raise RequestError(f"the environment has SLURM_STEP_ID, but no {name}")
    return integer(name, environ[name])
