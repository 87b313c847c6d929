"""Environment that a launcher such as torchrun gives a script; torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.agent.assignment import RankAssignment
from trainer.contract.errors import RequestError
from trainer.contract.rendezvous_url import parse_rendezvous_url, scheme_of
from trainer.host.addresses import is_loopback
from trainer.host.cores import threads_of_quota
from trainer.host.import_path import ASIDE
from trainer.host.ports import free_port

RUN_DIR = "GPUTRAIN_RUN_DIR"
"""Environment variable with the run directory, where ``trainer.watch`` in a script finds the record."""
RANK_PID = "GPUTRAIN_RANK_PID"
"""Environment variable with the pid of the rank whose states and end ``trainer.agent.script`` records."""
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
"""Environment variable of torchrun with the number of nodes; a plan with several nodes sets it."""
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
"""Environment variables of torchrun with the number of restarts so far, and the most there may be; a plan sets them."""
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", GROUP_WORLD_SIZE, "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", RESTART_COUNT, MAX_RESTARTS,
)  # fmt: skip
"""Environment variables of torchrun that only a rank has."""
TORCHRUN_STORE_VARIABLES = (
    "TORCHELASTIC_RUN_ID", RESTART_COUNT, MAX_RESTARTS, "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


def refuse_file_rendezvous(init_method: str | None) -> None:
    """Raise ``RequestError`` for ``file://``, for which the environment of a launcher has no variables."""
    if init_method is not None and scheme_of(init_method) == "file":
        raise RequestError(
            f"{init_method}: a script uses MASTER_ADDR and MASTER_PORT for its rendezvous, not a file; use tcp://HOST:PORT"
        )


def master_address(init_method: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and the port on which rank 0 of a script listens, by ``tcp://HOST:PORT`` or ``env://``.

    A single rank has no init method, but its script may still create a group, on a free port.
    """
    if init_method is None:
        return "127.0.0.1", free_port()
    method = parse_rendezvous_url(init_method)
    assert method is not None
    if method.scheme == "env":
        return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    assert method.scheme == "tcp"
    return method.host, method.port


def launcher_environment(
    assignment: RankAssignment, address: tuple[str, int], environ: Mapping[str, str], *, starts_ranks: bool = False
) -> dict[str, str | None]:
    """Return the variables of a script's rank, named as torchrun names them; None removes one.

    Args:
        assignment: the rank.
        address: host and port on which rank 0 listens.
        environ: environment of the command, whose own settings of NCCL, OpenMP and accelerate are kept.
        starts_ranks: whether the script starts the ranks. Then it gets none of the variables of a rank, by which
            launchers in scripts see that another one has started the ranks.
    """
    host, port = address
    rank, world = str(assignment.rank), str(assignment.world_size)
    nodes = _node_count(assignment, environ)
    # Ranks that meet in the store of torchrun's agent keep its variables: rank 0 must not serve another store.
    in_agents_store = assignment.init_method is not None and scheme_of(assignment.init_method) == "env"
    kept = TORCHRUN_STORE_VARIABLES if in_agents_store else ()
    settings: dict[str, str | None] = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(assignment.local_rank),
        "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
        "GROUP_RANK": str(assignment.node),
        GROUP_WORLD_SIZE: nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": assignment.run_id or "none",  # as torchrun names a run without an id
        RESTART_COUNT: environ.get(RESTART_COUNT, "0"),
        MAX_RESTARTS: environ.get(MAX_RESTARTS, "0"),
        "TORCHELASTIC_USE_AGENT_STORE": None,
        **{name: environ[name] for name in kept if name in environ},
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        # The fork server has 1; ranks that share a machine get 1 unless the user has set it, as under torchrun.
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS")
        or ("1" if assignment.local_world_size > 1 else threads_of_quota()),
        "PYTORCH_NVML_BASED_CUDA_CHECK": environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
        RUN_DIR: assignment.run_dir,
    }
    if starts_ranks:
        settings |= dict.fromkeys(RANK_VARIABLES)
        settings |= {"NODE_RANK": str(assignment.node), "NNODES": nodes}
    if nodes is not None:  # else it is typed by hand in a step of all nodes
        settings |= _slurm_task(assignment, nodes, environ, starts_ranks=starts_ranks)
    if ASIDE in environ:
        settings |= {"PYTHONPATH": environ[ASIDE], ASIDE: None}
    if assignment.device_id is None:
        # For CPU ranks: a script would use a GPU that it sees.
        settings["CUDA_VISIBLE_DEVICES"] = ""
        # Without it accelerate, and so Hugging Face's Trainer, lets each rank on a CPU train alone.
        settings["ACCELERATE_USE_CPU"] = environ.get("ACCELERATE_USE_CPU", "true")
    if is_loopback(host) and "GLOO_SOCKET_IFNAME" not in environ:
        # Otherwise gloo uses the address to which the machine's name resolves, which need not be reachable.
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return settings


def _slurm_task(
    assignment: RankAssignment, nodes: str, environ: Mapping[str, str], *, starts_ranks: bool
) -> dict[str, str | None]:
    """Return the variables of a Slurm step, as far as there are any, by which scripts find their rank, too.

    They are those of one step on all nodes with a task for each rank, or for each node whose script starts the ranks;
    of its own steps each has one node, so that every node would be the first.
    """
    node, local, world = str(assignment.node), assignment.local_world_size, assignment.world_size
    even = world % local == 0 and assignment.rank // local == assignment.node
    rank, local_rank, tasks = str(assignment.rank), str(assignment.local_rank), str(world)
    per_node = str(local) if even else None
    if starts_ranks:
        rank, local_rank, tasks, per_node = node, "0", nodes, "1"
    per_nodes = f"{per_node}(x{nodes})" if per_node is not None and nodes != "1" else per_node
    step: dict[str, str | None] = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": node,
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), nodes),
        "SLURM_NTASKS_PER_NODE": per_node,
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_nodes),
    }
    if environ.get("SLURM_STEP_NUM_NODES") != nodes:
        step["SLURM_STEP_NODELIST"] = None  # of the others' steps it is not known; the job's list has all nodes
    return {name: value for name, value in step.items() if name in environ}


def _node_count(assignment: RankAssignment, environ: Mapping[str, str]) -> str | None:
    """Return the number of nodes; None if nodes with unequal numbers of ranks were typed by hand without it."""
    local, world = assignment.local_world_size, assignment.world_size
    if local == world:
        return "1"
    if given := environ.get(GROUP_WORLD_SIZE) or environ.get("SLURM_STEP_NUM_NODES"):
        return given
    even = world % local == 0 and assignment.rank // local == assignment.node
    return str(world // local) if even else None
