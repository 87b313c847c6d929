"""Register ranks in a store, and name those that are missing, duplicate or of another run.

``init_process_group`` waits without naming the missing ranks. Therefore every rank registers in a store first, rank 0
declares the group complete or any rank refuses it, and all ranks end with the same message.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError, TrainingError, ranks_text
from trainer.distributed.collectives import RankRequest, disagreement
from trainer.distributed.store import (
    KEY_PREFIX,
    JoinTimeoutError,
    RendezvousStore,
    Wait,
    lost_store,
    remove_store_file,
    wait_for_keys,
)
from trainer.host.boot import boot_id
from trainer.host.processes import exists, namespace

REFUSAL_LINGER_S = 3.0
"""Maximum time for which rank 0 keeps the store open so that the others can read a refusal."""


class Registration(msgspec.Struct, kw_only=True, frozen=True):
    """Registration of a rank in the store."""

    rank: int
    world_size: int
    identity: str
    """Run id; must be equal on all ranks."""
    host: str
    pid: int
    pid_namespace: str
    """Machine and PID namespace; equal for processes that see each other's pids."""
    network_namespace: str
    """Machine and network namespace; equal for processes that reach each other through the loopback interface."""
    device: str = ""
    """UUID of the GPU; empty on a CPU or where sharing is allowed."""

    @property
    def process(self) -> str:
        return f"pid {self.pid} on {self.host}"


class RankMachine(msgspec.Struct, kw_only=True, frozen=True):
    """Ranks, in ascending order, that reach each other through the loopback interface."""

    host: str
    ranks: list[int]

    @property
    def name(self) -> str:
        return f"{self.host} ({ranks_text(self.ranks)})"


class RendezvousResult(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Result of the rendezvous, the same for all ranks."""

    refusal: str = ""
    """Reason why no group is formed; empty if one is."""
    timed_out: bool = False
    """Whether the refusal is that ranks are missing at the time-out."""
    machines: list[RankMachine] = []
    """Members by machine; rank 0's machine is first."""


def own_registration(*, rank: int, world_size: int, identity: str, device: str = "") -> Registration:
    """Return the registration of this process."""
    machine = boot_id() or socket.gethostname()
    network_namespace, pid_namespace = (
        machine if number is None else f"{machine}/{number}" for number in (namespace("net"), namespace("pid"))
    )
    return Registration(
        rank=rank,
        world_size=world_size,
        identity=identity,
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_namespace=pid_namespace,
        network_namespace=network_namespace,
        device=device,
    )


# -------------------------------------------------------------------------------------------------- the rendezvous


def join(
    rdzv: RendezvousStore, mine: Registration, wait: Wait, request: Mapping[str, str] | None = None
) -> RendezvousResult:
    """Register this process as its rank and wait until every rank is registered.

    Raises:
        RequestError: two processes register one rank or one GPU, or disagree on the world size, the run or a value of
            the request; or the store's file is left from an earlier run.
        JoinTimeoutError: ranks are missing.
        TrainingError: the store went away.
    """
    keys = PrefixStore(KEY_PREFIX, rdzv.store)
    rdzv.store.set_timeout(timedelta(seconds=10))
    try:
        return _join(keys, rdzv, mine, wait, request or {})
    except TrainingError:
        raise
    except RuntimeError as error:
        raise lost_store(rdzv, mine.rank, error) from None


def _join(
    keys: Store, rdzv: RendezvousStore, mine: Registration, wait: Wait, request: Mapping[str, str]
) -> RendezvousResult:
    if result := _read_result(keys):
        if result.refusal and rdzv.file is None:
            # The others may have refused each other before rank 0, which serves the store, registers.
            _await_refusal_read(keys, rdzv, mine)
        raise RequestError(_closed_message(rdzv, mine, result))
    first, holder = (_claim(keys, key, mine) for key in ("first", f"rank/{mine.rank}"))
    owns_rank = holder == mine
    refusal = _refusal(keys, rdzv, mine, first, holder, request)
    if refusal:
        # The other ranks, and with them the store, may have ended because of another refusal.
        with contextlib.suppress(RuntimeError):
            _propose_result(keys, RendezvousResult(refusal=refusal))
    else:
        # A key of its own: rank 0 may find all registrations before the last rank has checked its own.
        keys.set(f"ready/{mine.rank}", "")
    if refusal and not owns_rank:
        raise RequestError(refusal)
    present: set[int] = set()
    ready: set[int] = set()
    while (result := _read_result(keys)) is None:
        if owns_rank and mine.rank == 0 and len(_ready_ranks(keys, mine.world_size, ready)) == mine.world_size:
            _propose_result(keys, RendezvousResult(machines=_machines(keys, mine.world_size)))
            continue
        if wait.left_s <= 0:
            refused = _timeout_message(keys, rdzv, mine, present, wait.timeout_s)
            _propose_result(keys, RendezvousResult(refusal=refused, timed_out=True))
            continue
        wait.pause(lambda: _joined_and_missing(keys, mine.world_size, present))
    if not refusal and not result.refusal:
        return result
    _await_refusal_read(keys, rdzv, mine)
    if result.timed_out and not refusal:
        raise JoinTimeoutError(result.refusal)
    raise RequestError(refusal or result.refusal)


def _refusal(
    keys: Store,
    rdzv: RendezvousStore,
    mine: Registration,
    first: Registration,
    holder: Registration,
    request: Mapping[str, str],
) -> str:
    """Register request and GPU of this process, whose rank ``holder`` has; return why it is refused, empty if not.

    Each key is set by one compare-and-set, so of two processes exactly one sees the other's registration.
    """
    if holder != mine:
        return _stale_file_message(rdzv, holder, mine) or (
            f"rank {mine.rank} is claimed twice: by {holder.process} and by {mine.process}"
            + (f", or {rdzv.file} is left from an earlier run" if rdzv.file else "")
        )
    if first.world_size != mine.world_size:
        return _stale_file_message(rdzv, first, mine) or (
            f"ranks disagree on the world size: {first.world_size} on rank {first.rank} ({first.process}), "
            f"{mine.world_size} on rank {mine.rank} ({mine.process})"
        )
    if first.identity != mine.identity:
        return _stale_file_message(rdzv, first, mine) or (
            f"ranks of two runs use the same rendezvous, {rdzv.url}: "
            f"{first.identity!r} is rank {first.rank} ({first.process}), "
            f"{mine.identity!r} is rank {mine.rank} ({mine.process})"
        )
    own = RankRequest(rank=mine.rank, process=mine.process, values=dict(request))
    text = keys.compare_set("request", "", msgspec.json.encode(own).decode())
    if refusal := disagreement(own, msgspec.json.decode(text, type=RankRequest)):
        return refusal
    user = _claim(keys, f"device/{mine.device}", mine) if mine.device else mine
    if user == mine:
        return ""
    return (
        f"ranks {user.rank} and {mine.rank} ({user.process}, {mine.process}) use one GPU, {mine.device}; "
        "give every rank its own, or allow it with --share-devices"
    )


def _claim(keys: Store, key: str, mine: Registration) -> Registration:
    """Set a key unless it is set; return the registration that it holds."""
    text = msgspec.json.encode(mine).decode()
    return msgspec.json.decode(keys.compare_set(key, "", text), type=Registration)


def _stale_file_message(rdzv: RendezvousStore, holder: Registration, mine: Registration) -> str:
    """Return the refusal of a stale store file; empty unless the process that registered is known to have ended."""
    if rdzv.file is None or holder.pid_namespace != mine.pid_namespace or holder.pid == mine.pid:
        return ""
    if exists(holder.pid):
        return ""
    return (
        f"{rdzv.file} is left from an earlier run (rank {holder.rank}, {holder.process}, which has ended): "
        "delete it, or name a file that does not exist yet"
    )


def _closed_message(rdzv: RendezvousStore, mine: Registration, result: RendezvousResult) -> str:
    """Return the refusal for a rank that arrives after the result was set."""
    if result.refusal:
        return result.refusal + (f" (recorded in {rdzv.file}; delete it before the next attempt)" if rdzv.file else "")
    if rdzv.file is not None:
        return (
            f"{rdzv.file} is left from an earlier run, or in use by another one: "
            "delete it, or name a file that does not exist yet"
        )
    return f"rank {mine.rank} ({mine.process}) tried to join at {rdzv.url} after all {mine.world_size} ranks had joined"


def _read_result(keys: Store) -> RendezvousResult | None:
    return msgspec.json.decode(keys.get("result"), type=RendezvousResult) if keys.check(["result"]) else None


def _propose_result(keys: Store, result: RendezvousResult) -> None:
    """Set the result unless another rank has set one."""
    keys.compare_set("result", "", msgspec.json.encode(result).decode())


def _ready_ranks(keys: Store, world_size: int, ready: set[int]) -> set[int]:
    """Extend ``ready`` up to the first rank that is not ready: one request per poll while ranks are missing."""
    for rank in range(world_size):
        if rank in ready:
            continue
        if not keys.check([f"ready/{rank}"]):
            break
        ready.add(rank)
    return ready


def _joined_and_missing(keys: Store, world_size: int, present: set[int]) -> tuple[list[int], list[int]]:
    present.update(rank for rank in range(world_size) if rank not in present and keys.check([f"rank/{rank}"]))
    return sorted(present), [rank for rank in range(world_size) if rank not in present]


def _read_registration(keys: Store, rank: int) -> Registration:
    return msgspec.json.decode(keys.get(f"rank/{rank}"), type=Registration)


def _machines(keys: Store, world_size: int) -> list[RankMachine]:
    machines: dict[str, RankMachine] = {}
    for rank in range(world_size):
        holder = _read_registration(keys, rank)
        machines.setdefault(holder.network_namespace, RankMachine(host=holder.host, ranks=[])).ranks.append(rank)
    return list(machines.values())


def _timeout_message(
    keys: Store, rdzv: RendezvousStore, mine: Registration, present: set[int], timeout_s: float
) -> str:
    joined, missing = _joined_and_missing(keys, mine.world_size, present)
    if not missing:
        return f"rank 0 did not declare the group complete within {timeout_s:g} s at {rdzv.url}"
    processes = ", ".join(f"{rank} ({_read_registration(keys, rank).process})" for rank in joined[:16])
    more = f" and {len(joined) - 16} more" if len(joined) > 16 else ""
    return (
        f"{ranks_text(missing)} of {mine.world_size} did not join within {timeout_s:g} s at {rdzv.url}; "
        f"joined: {processes}{more}"
    )


def _await_refusal_read(keys: Store, rdzv: RendezvousStore, mine: Registration) -> None:
    """Mark the refusal as read by this rank; on rank 0's machine, wait until the others have read it too.

    A store other than a file lives in rank 0's process, which the node agent ends as soon as another rank of the
    machine has failed; therefore all ranks of that machine wait.
    """
    # The store may be gone already; this rank has read the refusal.
    with contextlib.suppress(RuntimeError):
        keys.set(f"refusal_read/{mine.rank}", "")
        if mine.rank != 0 and rdzv.file is not None:
            return  # rank 0 removes the file at once, and a read of a removed file waits until it times out
        joined, _ = _joined_and_missing(keys, mine.world_size, set())
        # The first rank may have been refused before it has registered as its rank.
        first = msgspec.json.decode(keys.get("first"), type=Registration) if keys.check(["first"]) else mine
        if mine.rank != 0 and (
            0 not in joined or _read_registration(keys, 0).network_namespace != mine.network_namespace
        ):
            return
        wait_for_keys(keys, [f"refusal_read/{rank}" for rank in {*joined, first.rank}], REFUSAL_LINGER_S)
    if mine.rank == 0:
        remove_store_file(rdzv)
