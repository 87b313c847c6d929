"""The rendezvous: ranks register in a store and learn who is missing, double or from another run.

A process group's own joining waits in silence and names nobody. Here every rank registrations its number in a store,
rank 0 declares the group complete or anybody declares it impossible, and all ranks end with the same words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError, TrainingError
from trainer.distributed.request import RankRequest, disagreement
from trainer.distributed.store import KEY_PREFIX, JoinTimeoutError, RendezvousStore, Wait, remove_store_file
from trainer.host.boot import boot_id
from trainer.host.processes import exists, namespace

LINGER_S = 3.0
"""How long rank 0 keeps the store open after a refusal, so that the others read it; less as soon as they have."""


class Registration(msgspec.Struct, kw_only=True, frozen=True):
    """What a rank says of itself when it joins."""

    rank: int
    world_size: int
    identity: str
    """Run id, or whatever else must be equal on all ranks."""
    host: str
    pid: int
    place: str
    """Equal for processes that see each other's pids."""
    network: str
    """Equal for processes that reach each other through the loopback interface."""
    device: str = ""
    """UUID of the GPU; empty on a CPU or where sharing is allowed."""

    @property
    def whom(self) -> str:
        """The process, for a message."""
        return f"pid {self.pid} on {self.host}"


class RankMachine(msgspec.Struct, kw_only=True, frozen=True):
    """Ranks that reach each other through the loopback interface."""

    host: str
    ranks: list[int]
    """In order."""

    @property
    def name(self) -> str:
        """Host and ranks, for a message."""
        return f"{self.host} ({span(self.ranks)})"


class RendezvousResult(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How the joining ended, the same for all ranks."""

    refusal: str = ""
    """Why there will be no group; empty when there is one."""
    timed_out: bool = False
    machines: list[RankMachine] = []
    """Who has joined from where; that of rank 0 first."""


def span(ranks: Sequence[int]) -> str:
    """``rank 4``, ``ranks 4, 5`` or ``ranks 4, 6 to 9``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [", ".join(map(str, range(low, high + 1))) if high - low < 2 else f"{low} to {high}" for low, high in parts]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def own_registration(*, rank: int, world_size: int, identity: str, device: str = "") -> Registration:
    """Return this process's registration to a rank."""
    machine = boot_id() or socket.gethostname()
    network, pids = (
        machine if number is None else f"{machine}/{number}" for number in (namespace("net"), namespace("pid"))
    )
    return Registration(
        rank=rank,
        world_size=world_size,
        identity=identity,
        host=socket.gethostname(),
        pid=os.getpid(),
        place=pids,
        network=network,
        device=device,
    )


# ----------------------------------------------------------------------------------------------------- the joining


def join(
    rdzv: RendezvousStore, mine: Registration, wait: Wait, request: Mapping[str, str] | None = None
) -> RendezvousResult:
    """Register this process as its rank and wait until every rank is registered.

    Args:
        rdzv: the store.
        mine: this process's registration.
        wait: how long to wait for the others.
        request: values by name that must be equal on all ranks.

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
        first = str(error).splitlines()[0]
        raise TrainingError(f"rank {mine.rank} lost the store at {rdzv.url} while joining: {first}") from None


def _join(
    keys: Store, rdzv: RendezvousStore, mine: Registration, wait: Wait, request: Mapping[str, str]
) -> RendezvousResult:
    if settled := _result(keys):
        if settled.refusal and rdzv.file is None:
            # The others may have refused each other before rank 0, which serves the store, came to registration its
            # rank.
            _leave_refused(keys, rdzv, mine)
        raise RequestError(_closed(rdzv, mine, settled))
    refusal, owner = _enter(keys, rdzv, mine, request)
    if refusal:
        # The others may have ended by another refusal meanwhile, and the store with them.
        with contextlib.suppress(RuntimeError):
            _settle(keys, RendezvousResult(refusal=refusal))
    else:
        # Not by the registration itself: rank 0 could find all ranks there before the last one has seen what is wrong
        # with it.
        keys.set(f"ready/{mine.rank}", "")
    if refusal and not owner:
        raise RequestError(refusal)
    present: set[int] = set()
    ready: set[int] = set()
    while (result := _result(keys)) is None:
        if owner and mine.rank == 0 and len(_arrived(keys, mine.world_size, ready)) == mine.world_size:
            _settle(keys, RendezvousResult(machines=_machines(keys, mine.world_size)))
            continue
        if wait.left_s <= 0:
            refused = _too_late(keys, rdzv, mine, present, wait.timeout_s)
            _settle(keys, RendezvousResult(refusal=refused, timed_out=True))
            continue
        wait.pause(lambda: _members(keys, mine.world_size, present))
    if not refusal and not result.refusal:
        return result
    _leave_refused(keys, rdzv, mine)
    if result.timed_out and not refusal:
        raise JoinTimeoutError(result.refusal)
    raise RequestError(refusal or result.refusal)


def _enter(keys: Store, rdzv: RendezvousStore, mine: Registration, request: Mapping[str, str]) -> tuple[str, bool]:
    """Write this process's registrations; return what is wrong with them, and whether the rank is ours.

    Each registration is one compare-and-set, so of two processes exactly one is told of the other.
    """
    founder = _take(keys, "founder", mine)
    holder = _take(keys, f"rank/{mine.rank}", mine)
    owner = holder == mine
    if not owner:
        return _left_over(rdzv, holder, mine) or (
            f"rank {mine.rank} is claimed twice: by {holder.whom} and by {mine.whom}"
            + (f", or {rdzv.file} is left from an earlier run" if rdzv.file else "")
        ), owner
    if founder.world_size != mine.world_size:
        return _left_over(rdzv, founder, mine) or (
            f"ranks disagree on the world size: {founder.world_size} says rank {founder.rank} ({founder.whom}), "
            f"{mine.world_size} says rank {mine.rank} ({mine.whom})"
        ), owner
    if founder.identity != mine.identity:
        return _left_over(rdzv, founder, mine) or (
            f"ranks of two runs meet at {rdzv.url}: {founder.identity!r} is rank {founder.rank} ({founder.whom}), "
            f"{mine.identity!r} is rank {mine.rank} ({mine.whom})"
        ), owner
    own = RankRequest(rank=mine.rank, whom=mine.whom, values=dict(request))
    text = keys.compare_set("request", "", msgspec.json.encode(own).decode())
    if different := disagreement(own, msgspec.json.decode(text, type=RankRequest)):
        return different, owner
    if mine.device:
        other = _take(keys, f"device/{mine.device}", mine)
        if other != mine:
            return (
                f"ranks {other.rank} and {mine.rank} ({other.whom}, {mine.whom}) use one GPU, {mine.device}; "
                "give every rank its own, or allow it with --share-devices"
            ), owner
    return "", owner


def _take(keys: Store, key: str, mine: Registration) -> Registration:
    """Claim a key; return who holds it."""
    text = msgspec.json.encode(mine).decode()
    return msgspec.json.decode(keys.compare_set(key, "", text), type=Registration)


def _left_over(rdzv: RendezvousStore, holder: Registration, mine: Registration) -> str:
    """Say that the file is from an earlier run, where the other process is known to have ended."""
    if rdzv.file is None or holder.place != mine.place or holder.pid == mine.pid:
        return ""
    if exists(holder.pid):
        return ""
    return (
        f"{rdzv.file} is left from an earlier run (rank {holder.rank}, {holder.whom}, which has ended): "
        "delete it, or name a file that does not exist yet"
    )


def _closed(rdzv: RendezvousStore, mine: Registration, result: RendezvousResult) -> str:
    """Say why there is nothing to join any more."""
    if result.refusal:
        return result.refusal + (f" (so says {rdzv.file}; delete it before the next attempt)" if rdzv.file else "")
    if rdzv.file is not None:
        return (
            f"{rdzv.file} is left from an earlier run, or in use by another one: "
            "delete it, or name a file that does not exist yet"
        )
    return f"rank {mine.rank} ({mine.whom}) came to {rdzv.url} after all {mine.world_size} ranks had joined"


def _result(keys: Store) -> RendezvousResult | None:
    return msgspec.json.decode(keys.get("verdict"), type=RendezvousResult) if keys.check(["verdict"]) else None


def _settle(keys: Store, result: RendezvousResult) -> None:
    """Propose a result; the first one counts."""
    keys.compare_set("verdict", "", msgspec.json.encode(result).decode())


def _arrived(keys: Store, world_size: int, ready: set[int]) -> set[int]:
    """Add to ``ready`` until the first rank that is not: cheap, and enough to know when all are."""
    for rank in range(world_size):
        if rank in ready:
            continue
        if not keys.check([f"ready/{rank}"]):
            break
        ready.add(rank)
    return ready


def _members(keys: Store, world_size: int, present: set[int]) -> tuple[list[int], list[int]]:
    present.update(rank for rank in range(world_size) if rank not in present and keys.check([f"rank/{rank}"]))
    return sorted(present), [rank for rank in range(world_size) if rank not in present]


def _holder(keys: Store, rank: int) -> Registration:
    return msgspec.json.decode(keys.get(f"rank/{rank}"), type=Registration)


def _machines(keys: Store, world_size: int) -> list[RankMachine]:
    found: dict[str, RankMachine] = {}
    for rank in range(world_size):
        holder = _holder(keys, rank)
        found.setdefault(holder.network, RankMachine(host=holder.host, ranks=[])).ranks.append(rank)
    return list(found.values())


def _too_late(keys: Store, rdzv: RendezvousStore, mine: Registration, present: set[int], timeout_s: float) -> str:
    joined, missing = _members(keys, mine.world_size, present)
    if not missing:
        return f"rank 0 did not declare the group complete within {timeout_s:g} s at {rdzv.url}"
    here = ", ".join(f"{rank} ({_holder(keys, rank).whom})" for rank in joined[:16])
    more = f" and {len(joined) - 16} more" if len(joined) > 16 else ""
    return (
        f"{span(missing)} of {mine.world_size} did not join within {timeout_s:g} s at {rdzv.url}; joined: {here}{more}"
    )


def _leave_refused(keys: Store, rdzv: RendezvousStore, mine: Registration) -> None:
    """Tell that this rank has read the refusal, and stay until all have, where the store would go with this rank.

    It is in rank 0's process, which is ended when another rank of its machine has failed.
    """
    # Whoever reads late may find the store gone, and knows nevertheless why there is no group.
    with contextlib.suppress(RuntimeError):
        keys.set(f"read/{mine.rank}", "")
        joined, _ = _members(keys, mine.world_size, set())
        if mine.rank != 0 and (0 not in joined or _holder(keys, 0).network != mine.network):
            return
        deadline = time.monotonic() + LINGER_S
        while not keys.check([f"read/{rank}" for rank in joined]) and time.monotonic() < deadline:
            time.sleep(0.005)
    if mine.rank == 0:
        remove_store_file(rdzv)
