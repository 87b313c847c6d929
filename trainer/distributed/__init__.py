"""Join and leave the process group, with the interface of fairseq's ``distributed_utils``, on CPU and GPU.

Its functions take what fairseq and HetSeq pass to them: their ``args``, ``group=`` and ``max_size=``. Without a process
group every function works too, as in a world of one rank.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.backends import is_nccl
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.contract.rendezvous_url import tcp_url
from trainer.distributed import (
    collectives,
    fairseq_arguments,
    flight_recorder,
    heartbeat,
    network_probe,
    peer_failure,
    rendezvous,
)
from trainer.distributed.collectives import (
    all_gather_list as all_gather_list,
    all_reduce as all_reduce,
    all_reduce_dict as all_reduce_dict,
    barrier as barrier,
    broadcast_object as broadcast_object,
    from_master as from_master,
    get_default_group as get_default_group,
    get_rank as get_rank,
    get_world_size as get_world_size,
    is_master as is_master,
    max_async as max_async,
    require_same as require_same,
    sum_async as sum_async,
)
from trainer.distributed.store import (
    JoinTimeoutError as JoinTimeoutError,
    OnWaiting,
    RendezvousStore,
    Wait,
    open_store,
    remove_store_file,
    wait_for_keys,
)
from trainer.host.ports import free_port


@dataclass
class _GroupState:
    """State of this process while it is in a group."""

    rdzv: RendezvousStore
    rank: int
    variables: tuple[str, ...]
    """Environment variables that ``distributed_init`` has set."""
    machines: list[rendezvous.RankMachine]
    """Members of the group, by machine."""
    interface: str | None = None
    """Network interface that this process has chosen; None if the user or the backend chooses it."""
    leave: Callable[[], None] = lambda: None


_group: _GroupState | None = None


# ------------------------------------------------------------------------------------------------------- join, leave


def infer_init_method(args: Any, force_distributed: bool = False) -> str | None:
    """Set ``args.distributed_*`` by the environment and the devices, as fairseq does; return the init method.

    An init method that is set already is kept. On one machine it is a free port of this machine.

    ``args`` are fairseq's or HetSeq's, or ``Distributed``; ``force_distributed`` sets one in a world of one rank too.
    Returns None for a single process.

    Raises:
        RequestError: the request contradicts itself, the environment or the machine.
    """
    from trainer.agent.count_exchange import exchange_counts
    from trainer.environments.decision import apply_counts
    from trainer.environments.dispatch import SINGLE_NODE_INIT, decide

    settings = fairseq_arguments.settings_of(args)
    if not isinstance(args, Distributed) and settings.distributed_init_method is not None:
        return str(settings.distributed_init_method)
    count = torch.cuda.device_count()
    options = fairseq_arguments.options_of(args, os.environ, count)
    decision = decide(options, os.environ, count)
    if decision.exchange is not None:
        counts = exchange_counts(decision.exchange, len(decision.ranks), timeout_s=options.join_timeout)
        decision = apply_counts(decision, counts)
    init_method = decision.init_method
    if init_method == SINGLE_NODE_INIT or (init_method is None and force_distributed):
        init_method = tcp_url("127.0.0.1", free_port())
    fairseq_arguments.set_decision(args, decision, init_method)
    return init_method


def bind_device(index: int | None) -> torch.device:
    """Make the GPU with this index in ``CUDA_VISIBLE_DEVICES`` the current device and return it; None is the CPU.

    Raises:
        RequestError: the GPU does not exist.
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


def distributed_init(args: Any = None, **group: Any) -> int:
    """Join the process group and return this process's rank; do nothing in a world of one rank.

    ``args`` are fairseq's or HetSeq's, or ``Distributed``, of which ``distributed_rank`` is this process's rank; it is
    set to the rank in the group. A process that is in a group already stays in it, with a warning. Without ``args``,
    ``group`` are the arguments of ``join_group``.

    Raises:
        RequestError: the request cannot be met, see ``join_group``.
        JoinTimeoutError: ranks are missing; the message names them.
    """
    if args is None:
        join_group(**group)
        return get_rank()
    settings = fairseq_arguments.settings_of(args)
    if dist.is_initialized():
        warnings.warn("this process is in a process group already, and stays in it", stacklevel=2)
    else:
        on_cpu = fairseq_arguments.runs_on_cpu(args, torch.cuda.device_count()) or not torch.cuda.is_available()
        defaults = Distributed()
        join_group(
            init_method=settings.distributed_init_method,
            world_size=settings.distributed_world_size or 1,
            rank=fairseq_arguments.rank_of(args),
            backend=getattr(settings, "distributed_backend", None) or defaults.distributed_backend,
            device=bind_device(None if on_cpu else settings.device_id or 0),
            timeout_s=getattr(settings, "distributed_timeout", defaults.distributed_timeout),
            join_timeout_s=getattr(settings, "join_timeout", defaults.join_timeout),
            share_devices=getattr(settings, "share_devices", defaults.share_devices),
        )
    settings.distributed_rank = get_rank()
    return get_rank()


def join_group(
    *,
    init_method: str | None,
    world_size: int,
    rank: int,
    backend: str,
    device: torch.device,
    timeout_s: float,
    join_timeout_s: float,
    on_waiting: OnWaiting | None = None,
    on_lost: Callable[[str], None] | None = None,
    on_unheard: Callable[[list[int]], None] | None = None,
    step: Callable[[], int | None] = lambda: None,
    identity: str = "",
    request: Mapping[str, str] | None = None,
    share_devices: bool = False,
) -> None:
    """Join the process group; do nothing in a world of one rank.

    About once a second ``on_waiting`` is called with the joined ranks, the missing ranks and the milliseconds waited.
    ``on_lost`` is called on a thread with a description when another machine is gone or has failed while this rank may
    wait in NCCL and makes no ``step``; it must report that and end the process. ``on_unheard`` is called on a thread of
    one rank of each machine with the ranks of machines whose heartbeats have stopped: at the start with none, and when
    they change. Ranks of another ``identity`` (the run id) are refused, and those with other values of the
    ``request``, such as ``--lr``. ``share_devices`` allows two ranks on one GPU.

    Raises:
        RequestError: the request cannot be met: port in use, stale file, a rank or a GPU claimed twice, ranks that
            disagree on the world size, the run or a value of the request.
        JoinTimeoutError: ranks are missing; the message names them.
    """
    global _group
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
    if is_nccl(backend) and (device.type != "cuda" or not dist.is_nccl_available()):
        raise RequestError(f"backend {backend} needs a GPU on every rank: allowed here is gloo")
    mine = rendezvous.own_registration(
        rank=rank, world_size=world_size, identity=identity, device="" if share_devices else device_uuid(device)
    )
    wait = Wait(join_timeout_s, on_waiting)
    rdzv = open_store(init_method, rank=rank, world_size=world_size, wait=wait, environ=os.environ)
    result = rendezvous.join(rdzv, mine, wait, {**(request or {}), "--distributed-backend": backend})
    variables: tuple[str, ...] = ()
    gloo = backend == "gloo"
    interface = network_probe.interface_for(rdzv, result, mine, gloo=gloo)
    if interface is not None:
        name, value = network_probe.interface_setting(interface, gloo=gloo)
        os.environ[name] = value
        variables = (name,)
    # Set before the group exists, so that shutdown removes the store's file even if the backend fails to connect.
    _group = _GroupState(rdzv, rank, variables, result.machines, interface)
    collectives.reset_exchange_counts()
    dist.init_process_group(
        backend,
        store=PrefixStore("group", rdzv.store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if is_nccl(backend) else None,
    )
    flight_recorder.attach(dist.group.WORLD)
    own = next(index for index, machine in enumerate(result.machines) if rank in machine.ranks)
    # A file to which all heartbeats are appended grows; with gloo nothing but the view of others depends on them.
    beats = len(result.machines) > 1 and rank == result.machines[own].ranks[0] and not (gloo and rdzv.file is not None)
    if beats and on_unheard is not None:
        beating = heartbeat.Heartbeat(rdzv.store, result.machines, own, step=step)
        # Gloo's connections break when a machine is gone, and a collective raises; NCCL waits for its time-out.
        _group.leave = heartbeat.start(beating, on_lost=None if gloo else on_lost, on_unheard=on_unheard)


def shutdown(*, abort: bool = False) -> None:
    """Leave the group. Call it once the result is on disk, and end the process afterwards.

    Gloo's threads may still be releasing the last collective's Python state: destroying the group under them hangs or
    aborts about one process in ten, so a short pause comes first. Rank 0, which serves the store, leaves last.

    With ``abort``, as a peer may be dead or stuck, return without waiting and without destroying the group, which would
    wait for pending collectives. The process must end next, by ``os._exit``.
    """
    global _group
    group, _group = _group, None
    if group is not None and not abort:  # a rank that aborts has reported its failure, or counts as lost
        group.leave()
    destroy_delay_s = 0.1  # pause before the group is destroyed, see ``shutdown``
    if dist.is_initialized() and not abort:
        world_size = dist.get_world_size()
        time.sleep(destroy_delay_s)
        dist.destroy_process_group()
        if group is not None:
            leave_store(group.rdzv.store, group.rank, world_size)
    if group is None:
        return
    for name in group.variables:
        os.environ.pop(name, None)
    if group.rank == 0:
        remove_store_file(group.rdzv)


def report_failure(message: str) -> None:
    """Report this rank's failure to ranks on other machines; the node agent reports it to those on this machine."""
    if _group is not None and len(_group.machines) > 1:
        peer_failure.report_failure(_group.rdzv, _group.rank, message)


def describe_lost_peers() -> str:
    """Describe the ranks that were lost, after a collective has failed; empty if they are unknown.

    Takes up to 5 s, and the group cannot be used afterwards.
    """
    if _group is None or len(_group.machines) < 2:
        return ""
    return peer_failure.describe_lost_peers(
        _group.rdzv, _group.machines, _group.rank, _group.interface or os.environ.get(network_probe.GLOO_INTERFACE)
    )


def leave_store(store: Store, rank: int, world_size: int) -> None:
    """Mark this rank as gone; rank 0 waits for the marks of all, briefly, because a peer may have died."""
    store_linger_s = 2.0  # maximum time for which rank 0 keeps the store open for ranks that have not left yet
    with contextlib.suppress(RuntimeError):  # the store is gone, with its process or its disk: no rank waits
        if rank != 0:
            store.set(f"left/{rank}", "")
        else:
            wait_for_keys(store, [f"left/{other}" for other in range(1, world_size)], store_linger_s)
