"""The process group: the seeds' interface, on CPUs and GPUs alike.

Every function also works in a process that is alone, without a group: the world then has one rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.distributed import collectives, network_probe, peer_failure, rendezvous
from trainer.distributed.collectives import (
    all_gather_list,
    all_reduce,
    all_reduce_dict,
    barrier,
    broadcast_object,
    check_same,
    from_master,
    get_default_group,
    get_rank,
    get_world_size,
    is_master,
    max_later,
    sum_later,
)
from trainer.distributed.request import require_same
from trainer.distributed.store import JoinTimeoutError, RendezvousStore, Wait, Waiting, open_store, remove_store_file

__all__ = [
    "JoinTimeoutError",
    "all_gather_list",
    "all_reduce",
    "all_reduce_dict",
    "barrier",
    "bind_device",
    "broadcast_object",
    "check_same",
    "device_uuid",
    "distributed_init",
    "from_master",
    "get_default_group",
    "get_rank",
    "get_world_size",
    "infer_init_method",
    "is_master",
    "lost_by",
    "max_later",
    "report_failure",
    "require_same",
    "shutdown",
    "sum_later",
]

_QUIET_S = 0.1
"""Rest before the group is destroyed, see ``shutdown``."""
_LEAVE_S = 2.0
"""How long rank 0 waits for the others to leave before it takes the store away."""


@dataclass
class _GroupState:
    """What this process holds while it is in a group."""

    rdzv: RendezvousStore
    rank: int
    variables: tuple[str, ...]
    """Environment variables that joining has set."""
    machines: list[rendezvous.RankMachine]
    """Who is in the group, by machine."""


_here: _GroupState | None = None


# ---------------------------------------------------------------------------------------------------------- joining


def infer_init_method(options: Distributed, *, device_count: int = 0) -> str | None:
    """Return the init method that the options and the environment lead to; None for a single process."""
    from trainer.environments.dispatch import decide

    return decide(options, os.environ, device_count).init_method


def bind_device(index: int | None) -> torch.device:
    """Make the GPU of this local index, counted within ``CUDA_VISIBLE_DEVICES``, the current one; None is the CPU.

    Raises:
        RequestError: there is no such GPU.
    """
    if index is None:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        among = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise RequestError(f"device {index} does not exist: torch sees {count} GPUs here{among}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, or an empty string for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def distributed_init(
    *,
    init_method: str | None,
    world_size: int,
    rank: int,
    backend: str,
    device: torch.device,
    timeout_s: float,
    join_timeout_s: float,
    on_waiting: Waiting | None = None,
    identity: str = "",
    request: Mapping[str, str] | None = None,
    share_devices: bool = False,
) -> None:
    """Join the process group; in a world of one rank there is none to join.

    Args:
        init_method: ``tcp://HOST:PORT``, ``file:///PATH`` or ``env://``.
        world_size: ranks in all.
        rank: this process's.
        backend: ``gloo``, ``nccl``, or ``auto`` for nccl on a GPU and gloo on a CPU.
        device: what this rank computes on.
        timeout_s: what a collective may take, in seconds.
        join_timeout_s: how long to wait for the other ranks, in seconds.
        on_waiting: told about once a second who has joined, who has not and the milliseconds waited.
        identity: run id; ranks with another one are refused.
        request: values by name that must be equal on all ranks, such as ``--lr``; ranks with another one are refused.
        share_devices: allow two ranks on one GPU.

    Raises:
        RequestError: the request cannot be met: port in use, stale file, a rank or a GPU claimed twice, ranks that
            disagree on the world size, the run or a value of the request.
        JoinTimeoutError: ranks are missing; the message names them.
    """
    global _here
    if world_size == 1:
        return
    if not 0 <= rank < world_size:
        raise RequestError(f"rank {rank} does not exist in a world of {world_size}: allowed are 0 to {world_size - 1}")
    if init_method is None:
        raise RequestError(f"a world of {world_size} ranks needs an init method: tcp://HOST:PORT, file:///PATH, env://")
    if dist.is_initialized():
        raise RequestError("this process is in a process group already")
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise RequestError("backend nccl needs a GPU on every rank: allowed here is gloo")
    mine = rendezvous.own_registration(
        rank=rank,
        world_size=world_size,
        identity=identity,
        device="" if share_devices else device_uuid(device),
    )
    wait = Wait(join_timeout_s, on_waiting)
    rdzv = open_store(init_method, rank=rank, world_size=world_size, wait=wait, environ=os.environ)
    result = rendezvous.join(rdzv, mine, wait, {**(request or {}), "--distributed-backend": backend})
    variables: tuple[str, ...] = ()
    if interface := network_probe.interface_for(rdzv, result, mine, gloo=backend == "gloo"):
        os.environ[network_probe.GLOO_INTERFACE] = interface
        variables = (network_probe.GLOO_INTERFACE,)
    # Before the group exists: shutdown clears the meeting away even if the backend then fails to connect.
    _here = _GroupState(rdzv, rank, variables, result.machines)
    collectives.count_anew()
    dist.init_process_group(
        backend,
        store=PrefixStore("group", rdzv.store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )


def shutdown(*, abort: bool = False) -> None:
    """Leave the group in order; call it once the result is on disk, then end the process.

    Gloo's threads may still be releasing the last collective's Python state: destroying the group under them hangs or
    aborts about one process in ten, therefore a short rest comes first. Rank 0, which holds the store, leaves last.

    Args:
        abort: a peer may be dead or stuck. Nothing is waited for, so the group is not destroyed either: that waits
            for the collectives that are under way. The process must end next, by ``os._exit``.
    """
    global _here
    here, _here = _here, None
    if dist.is_initialized() and not abort:
        world_size = dist.get_world_size()
        time.sleep(_QUIET_S)
        dist.destroy_process_group()
        if here is not None:
            _leave(here.rdzv.store, here.rank, world_size)
    if here is None:
        return
    for name in here.variables:
        os.environ.pop(name, None)
    if here.rank == 0:
        remove_store_file(here.rdzv)


def report_failure(message: str) -> None:
    """Tell the ranks on other machines why this one fails; those on this machine learn it from their parent."""
    if _here is not None and len(_here.machines) > 1:
        peer_failure.report_failure(_here.rdzv, _here.rank, message)


def lost_by() -> str:
    """Return whom this rank has lost, after a collective has failed, in a few words; empty when it cannot be told.

    It takes some seconds, and the group is of no use afterwards.
    """
    if _here is None or len(_here.machines) < 2:
        return ""
    return peer_failure.ask_peers(_here.rdzv, _here.machines, _here.rank, os.environ.get(network_probe.GLOO_INTERFACE))


def _leave(store: Store, rank: int, world_size: int) -> None:
    """Let rank 0 wait until nobody needs the store any more; not for long, because a peer may have died."""
    gone = [f"left/{other}" for other in range(1, world_size)]
    try:
        if rank != 0:
            store.set(f"left/{rank}", "")
            return
        deadline = time.monotonic() + _LEAVE_S
        while not store.check(gone) and time.monotonic() < deadline:
            time.sleep(0.005)
    except RuntimeError:
        # The store is gone, with its process or its disk: nobody is left to be told.
        return
