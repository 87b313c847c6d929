"""The dispatch decision: which ranks start here, on which devices, and their init method."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.contract.errors import RequestError, quoted
from trainer.contract.options import Distributed

Mode = Literal["explicit", "environment", "slurm", "single_node", "single_process"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Nodes that do not know each other's device counts, and where they tell each other.

    Slurm starts one task per node and says nothing about the GPUs of the other nodes, which may have more or fewer.
    """

    node: int
    """Index of this node in the step."""
    nodes: int
    host: str
    """The step's first node."""
    port: int
    """A port beside the one of the init method."""
    expected_world: int | None
    """``--distributed-world-size``, where it was given."""
    key: str = dataclasses.field(repr=False)
    """What all tasks of the step know and sign their lines with."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What this process starts. ``first_rank``, ``rank`` and ``local_rank`` are three different things."""

    mode: Mode
    world_size: int
    first_rank: int
    """Rank of the first process that is started here."""
    ranks: tuple[int, ...]
    """Ranks that this process starts; one when it is a rank itself."""
    local_ranks: tuple[int, ...]
    """Index within the node of each of ``ranks``."""
    local_world_size: int
    """Ranks on this node, those of other launcher processes included where that is known."""
    device_ids: tuple[int | None, ...]
    """GPU of each of ``ranks``, as an index under CUDA_VISIBLE_DEVICES; None is the CPU."""
    init_method: str | None
    """None when there is one rank. Port 0 in a ``tcp://127.0.0.1:0`` stands for one that is found free on acting."""
    spawn: bool
    """Whether ranks are processes of their own; otherwise this process is the rank."""
    backend: Literal["nccl", "gloo"]
    why: str
    """One line for people."""
    exchange: Exchange | None = None
    """Set when ranks and world size suppose that all nodes are like this one, and the nodes must confirm it."""


def with_counts(decision: Decision, counts: Sequence[int]) -> Decision:
    """Return the decision with the true rank offset and world size, from the ranks of every node.

    Raises:
        RequestError: the counts do not add up to the world size that was asked for.
    """
    exchange = decision.exchange
    assert exchange is not None
    assert len(counts) == exchange.nodes
    assert counts[exchange.node] == len(decision.ranks)
    world = sum(counts)
    if exchange.expected_world not in (None, world):
        raise RequestError(
            f"--distributed-world-size is {exchange.expected_world}, but the nodes have {_sum_text(counts)} ranks"
        )
    first = sum(counts[: exchange.node])
    return dataclasses.replace(
        decision,
        world_size=world,
        first_rank=first,
        ranks=tuple(range(first, first + len(decision.ranks))),
        why=f"{decision.why}; nodes have {_sum_text(counts)} ranks",
        exchange=None,
    )


def _sum_text(counts: Sequence[int]) -> str:
    return " + ".join(str(count) for count in counts) + f" = {sum(counts)}"


def choose_backend(options: Distributed, device_count: int, *, shared: bool) -> Literal["nccl", "gloo"]:
    """Return nccl on GPUs and gloo on CPUs, or what was asked for where it can work.

    Args:
        options: the flags.
        device_count: GPUs that the ranks use; 0 on the CPU.
        shared: whether two ranks share a GPU, which NCCL refuses.
    """
    if options.distributed_backend == "nccl" and device_count == 0:
        raise RequestError("--distributed-backend nccl needs GPUs, but the ranks here run on the CPU: use gloo or auto")
    if options.distributed_backend == "nccl" and shared:
        raise RequestError("--distributed-backend nccl refuses two ranks on one GPU: use gloo or auto")
    if options.distributed_backend != "auto":
        return options.distributed_backend
    return "gloo" if device_count == 0 or shared else "nccl"


def require_devices(options: Distributed, device_count: int, world_size: int) -> None:
    """Refuse several ranks without GPUs unless the CPU was asked for.

    Falling back in silence would turn a broken driver into a job that is a hundred times slower.
    """
    if not options.cpu and device_count == 0 and world_size > 1:
        raise RequestError(
            f"{world_size} ranks were asked for, but no GPU is visible on this machine: "
            "add --cpu to train on CPUs, or look at the driver and CUDA_VISIBLE_DEVICES"
        )


def place(options: Distributed, device_count: int, count: int) -> tuple[tuple[int | None, ...], bool]:
    """Return the devices of ``count`` ranks that start together here, and whether two of them share one.

    Raises:
        RequestError: there are fewer GPUs than ranks, and sharing was not asked for.
    """
    if options.cpu or device_count == 0:
        return (None,) * count, False
    if count > device_count and not options.share_devices:
        raise RequestError(
            f"{count} ranks were asked for on this node, but it has {gpus(device_count)} visible: "
            "ask for fewer, or add --share-devices to put several ranks on one GPU"
        )
    return tuple(index % device_count for index in range(count)), count > device_count


def check_device(device_id: int, device_count: int, name: str) -> int:
    """Return the device index, or refuse it when there is no such GPU."""
    if device_id >= device_count:
        allowed = "no GPU is visible here" if device_count == 0 else f"the GPUs here are 0 to {device_count - 1}"
        raise RequestError(f"{name} is {device_id}, but {allowed}")
    return device_id


def gpus(count: int) -> str:
    """Return ``no GPU``, ``1 GPU`` or ``4 GPUs``."""
    return "no GPU" if count == 0 else f"{count} GPU{'s' if count > 1 else ''}"


def integer(name: str, text: str, *, low: int = 0) -> int:
    """Read an integer from an environment variable.

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
