"""The dispatch decision, and the checks that all environments share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    first_rank: int
    """Lowest rank of this node."""
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
    if exchange.expected_world not in (None, world):
        raise RequestError(
            f"--distributed-world-size is {exchange.expected_world}, but the nodes have {_count_sum(counts)} ranks"
        )
    first = sum(counts[: exchange.node])
    return dataclasses.replace(
        decision,
        world_size=world,
        first_rank=first,
        ranks=tuple(range(first, first + len(decision.ranks))),
        why=f"{decision.why}; nodes have {_count_sum(counts)} ranks",
        exchange=None,
    )


def _count_sum(counts: Sequence[int]) -> str:
    return " + ".join(str(count) for count in counts) + f" = {sum(counts)}"


def choose_backend(options: Distributed, device_count: int, *, shared: bool) -> Literal["nccl", "gloo"]:
    """Return the backend of the flags; for ``auto`` nccl on GPUs, gloo on CPUs and on shared GPUs.

    Args:
        options: the flags.
        device_count: GPUs that the ranks use; 0 on the CPU.
        shared: whether two ranks share a GPU, which NCCL refuses.

    Raises:
        RequestError: nccl without a GPU, or on a shared one.
    """
    if options.distributed_backend == "nccl" and device_count == 0:
        raise RequestError("--distributed-backend nccl needs GPUs, but the ranks here run on the CPU: use gloo or auto")
    if options.distributed_backend == "nccl" and shared:
        raise RequestError("--distributed-backend nccl refuses two ranks on one GPU: use gloo or auto")
    if options.distributed_backend != "auto":
        return options.distributed_backend
    return "gloo" if device_count == 0 or shared else "nccl"


def require_devices(options: Distributed, device_count: int, world_size: int) -> None:
    """Refuse several ranks without a GPU, unless ``--cpu`` is given.

    With a silent fallback, a broken driver would mean a job that is a hundred times slower.

    Raises:
        RequestError: several ranks and no visible GPU.
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


def check_device(device_id: int, device_count: int, name: str) -> int:
    """Return a device index after checking that it exists; ``name`` is its flag or variable in the message."""
    if device_id >= device_count:
        allowed = "no GPU is visible here" if device_count == 0 else f"the GPUs here are 0 to {device_count - 1}"
        raise RequestError(f"{name} is {device_id}, but {allowed}")
    return device_id


def gpu_text(count: int) -> str:
    """Return ``no GPU``, ``1 GPU`` or ``4 GPUs``."""
    return "no GPU" if count == 0 else f"{count} GPU{'s' if count > 1 else ''}"


def parse_integer(name: str, text: str, *, low: int = 0) -> int:
    """Parse the value of an environment variable as an integer.

    Raises:
        RequestError: it is no integer, or below ``low``.
    """
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise RequestError(f"the environment's {name} is {quoted(text)}, but must be an integer >= {low}")
    return value
