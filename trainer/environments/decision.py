"""The dispatch decision, and the checks that all environments share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.contract.backends import is_nccl
from trainer.contract.errors import RequestError, quoted
from trainer.contract.options import Distributed

Mode = Literal["explicit", "environment", "slurm", "single_node", "single_process"]


@dataclass(frozen=True, kw_only=True)
class CountExchange:
    """Exchange of the nodes' rank counts, needed before the ranks can be numbered.

    A Slurm step with one task per node has no variable with the GPUs of the other nodes, which may have more or fewer.
    """

    node: int
    """Index of this node in the step."""
    nodes: int
    host: str
    """The step's first node."""
    port: int
    """Port of the exchange, next to that of the init method."""
    expected_world: int | None
    """``--distributed-world-size``; None if it was not given."""
    key: str = dataclasses.field(repr=False)
    """Key shared by all tasks of the step, for the HMAC of their lines."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Ranks that this process starts, or the rank that it is, with their devices and init method."""

    mode: Mode
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that this process starts; its own rank if ``spawn`` is False."""
    local_ranks: tuple[int, ...]
    """Index within the node of each of ``ranks``."""
    local_world_size: int
    """Ranks on this node, including those that a launcher started as other processes, if their number is known."""
    device_ids: tuple[int | None, ...]
    """GPU of each of ``ranks``, as an index under CUDA_VISIBLE_DEVICES; None is the CPU."""
    init_method: str | None
    """None in a world of one rank. In ``tcp://127.0.0.1:0`` the agent replaces port 0 by a free one."""
    spawn: bool
    """Whether to start worker processes; otherwise this process is the rank."""
    backend: Literal["nccl", "gloo"]
    why: str
    """Reason of the decision, one line, printed at the start."""
    exchange: CountExchange | None = None
    """Exchange to make first, if ranks and world size were computed as if all nodes had the GPUs of this one."""

    @property
    def first_rank(self) -> int:
        return self.ranks[0]


def decide_node(
    mode: Mode,
    options: Distributed,
    device_count: int,
    *,
    world: int,
    first: int,
    count: int,
    init_method: str | None,
    why: str,
    exchange: CountExchange | None = None,
) -> Decision:
    """Return the decision that this process starts ``count`` ranks, from ``first`` on, and is the rank if it is one."""
    if options.device_id is None or not device_count:
        device_ids, shared = assign_devices(options, device_count, count)
    elif count > 1:
        raise RequestError(
            f"--device-id is for one rank, but {count} start here: choose their GPUs with CUDA_VISIBLE_DEVICES"
        )
    else:
        device_ids, shared = (check_device(options.device_id, device_count),), False
    return Decision(
        mode=mode,
        world_size=world,
        ranks=tuple(range(first, first + count)),
        local_ranks=tuple(range(count)),
        local_world_size=count,
        device_ids=device_ids,
        init_method=init_method,
        spawn=count > 1,
        backend=choose_backend(options, device_count, shared=shared),
        why=why,
        exchange=exchange,
    )


def decide_rank(
    mode: Mode,
    options: Distributed,
    device_count: int,
    *,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    init_method: str | None,
    why: str,
    own_device: bool,
) -> Decision:
    """Return the decision that this process is one rank.

    With ``own_device`` a single visible GPU belongs to this process alone, whatever its local rank is.
    """
    local_world = max(local_world, local_rank + 1)
    device, shared = local_rank, False
    if device_count and options.device_id is not None:
        device = check_device(options.device_id, device_count)
    elif device_count == 1 and own_device:
        device = 0
    elif device_count and local_world > device_count:
        if not options.share_devices:
            ranks, remedy = f"local rank {local_rank} of {local_world}", "start fewer ranks"
            if mode == "slurm":
                ranks, remedy = f"Slurm started {local_world} tasks", "ask srun for one task per GPU"
            raise RequestError(
                f"{ranks} on this node, but it has {gpu_text(device_count)} visible: {remedy}, or add --share-devices"
            )
        device, shared = local_rank % device_count, True
    return Decision(
        mode=mode,
        world_size=world,
        ranks=(rank,),
        local_ranks=(local_rank,),
        local_world_size=local_world,
        device_ids=(device if device_count else None,),
        init_method=init_method if world > 1 else None,
        spawn=False,
        backend=choose_backend(options, device_count, shared=shared),
        why=why,
    )


def apply_counts(decision: Decision, counts: Sequence[int]) -> Decision:
    """Return the decision with rank offset and world size computed from the count of every node.

    Raises:
        RequestError: the counts do not add up to ``--distributed-world-size``.
    """
    exchange = decision.exchange
    assert exchange is not None
    assert len(counts) == exchange.nodes
    assert counts[exchange.node] == len(decision.ranks)
    world = sum(counts)
    count_sum = " + ".join(map(str, counts)) + f" = {world}"
    if exchange.expected_world not in (None, world):
        raise RequestError(
            f"--distributed-world-size is {exchange.expected_world}, but the nodes have {count_sum} ranks"
        )
    first = sum(counts[: exchange.node])
    return dataclasses.replace(
        decision,
        world_size=world,
        ranks=tuple(range(first, first + len(decision.ranks))),
        why=f"{decision.why}; nodes have {count_sum} ranks",
        exchange=None,
    )


def choose_backend(options: Distributed, device_count: int, *, shared: bool) -> Literal["nccl", "gloo"]:
    """Return the backend of the flags; for ``auto`` nccl on GPUs, gloo on CPUs and on shared GPUs.

    Raises:
        RequestError: nccl without a GPU, or on a shared one, which NCCL refuses.
    """
    if is_nccl(options.distributed_backend) and device_count == 0:
        raise RequestError("--distributed-backend nccl needs GPUs, but the ranks here run on the CPU: use gloo or auto")
    if is_nccl(options.distributed_backend) and shared:
        raise RequestError("--distributed-backend nccl refuses two ranks on one GPU: use gloo or auto")
    if options.distributed_backend != "auto":
        return options.distributed_backend
    return "gloo" if device_count == 0 or shared else "nccl"


def require_devices(options: Distributed, device_count: int, world_size: int) -> None:
    """Raise ``RequestError`` for several ranks without a visible GPU, unless ``--cpu`` is given.

    With a silent fallback, a broken driver would mean a job that is a hundred times slower.
    """
    if not options.cpu and device_count == 0 and world_size > 1:
        raise RequestError(
            f"{world_size} ranks were asked for, but no GPU is visible on this machine: "
            "add --cpu to train on CPUs, or check the driver and CUDA_VISIBLE_DEVICES"
        )


def assign_devices(options: Distributed, device_count: int, count: int) -> tuple[tuple[int | None, ...], bool]:
    """Return the devices of ``count`` ranks of this node, and whether two ranks share one.

    Raises:
        RequestError: fewer GPUs than ranks without ``--share-devices``.
    """
    if options.cpu or device_count == 0:
        return (None,) * count, False
    if count > device_count and not options.share_devices:
        raise RequestError(
            f"{count} ranks were asked for on this node, but it has {gpu_text(device_count)} visible: "
            "ask for fewer, or add --share-devices to put several ranks on one GPU"
        )
    return tuple(index % device_count for index in range(count)), count > device_count


def check_device(device_id: int, device_count: int) -> int:
    """Return a device index after checking that it exists."""
    if device_id >= device_count:
        allowed = "no GPU is visible here" if device_count == 0 else f"the GPUs here are 0 to {device_count - 1}"
        raise RequestError(f"--device-id is {device_id}, but {allowed}")
    return device_id


def gpu_text(count: int) -> str:
    """Return ``no GPU``, ``1 GPU`` or ``4 GPUs``."""
    return "no GPU" if count == 0 else f"{count} GPU{'s' if count > 1 else ''}"


def parse_integer(name: str, text: str, *, low: int = 0) -> int:
    """Parse the value of an environment variable; raise ``RequestError`` if it is no integer, or below ``low``."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise RequestError(f"the environment's {name} is {quoted(text)}, but must be an integer >= {low}")
    return value
