"""How the ranks of a run find each other, and how they learn who is missing, double or from another run.

A process group's own joining waits in silence and names nobody. Here every rank claims its number in a store,
rank 0 declares the group complete or anybody declares it impossible, and all ranks end with the same words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.errors import RequestError, TrainingError
from trainer.group.stores import BOOK, JoinTimeoutError, Meeting, Wait, clear_away

LINGER_S = 3.0
"""How long rank 0 keeps the store open after a refusal, so that the others read it; less as soon as they have."""


class Claim(msgspec.Struct, kw_only=True, frozen=True):
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


class Machine(msgspec.Struct, kw_only=True, frozen=True):
    """Ranks that reach each other through the loopback interface."""

    host: str
    ranks: list[int]
    """In order."""

    @property
    def name(self) -> str:
        """Host and ranks, for a message."""
        return f"{self.host} ({span(self.ranks)})"


class Verdict(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How the joining ended, the same for all ranks."""

    refusal: str = ""
    """Why there will be no group; empty when there is one."""
    timed_out: bool = False
    machines: list[Machine] = []
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


def claim(*, rank: int, world_size: int, identity: str, device: str = "") -> Claim:
    """Return this process's claim to a rank."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    network, pids = (
        f"{machine}/{space.stat().st_ino}" if space.exists() else machine
        for space in (Path("/proc/self/ns/net"), Path("/proc/self/ns/pid"))
    )
    return Claim(
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


def join(meeting: Meeting, mine: Claim, wait: Wait) -> Verdict:
    """Claim this process's rank and wait until every rank has claimed its own.

    Raises:
        RequestError: two processes claim one rank or one GPU, or disagree on the world size or the run; or the
            store's file is left from an earlier run.
        JoinTimeoutError: ranks are missing.
        TrainingError: the store went away.
    """
    book = PrefixStore(BOOK, meeting.store)
    meeting.store.set_timeout(timedelta(seconds=10))
    try:
        return _join(book, meeting, mine, wait)
    except TrainingError:
        raise
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise TrainingError(f"rank {mine.rank} lost the store at {meeting.url} while joining: {first}") from None


def _join(book: Store, meeting: Meeting, mine: Claim, wait: Wait) -> Verdict:
    if settled := _verdict(book):
        if settled.refusal and meeting.file is None:
            # The others may have refused each other before rank 0, which serves the store, came to claim its rank.
            _leave_refused(book, meeting, mine)
        raise RequestError(_closed(meeting, mine, settled))
    refusal, owner = _enter(book, meeting, mine)
    if refusal:
        # The others may have ended by another refusal meanwhile, and the store with them.
        with contextlib.suppress(RuntimeError):
            _settle(book, Verdict(refusal=refusal))
    else:
        # Not by the claim itself: rank 0 could find all ranks there before the last one has seen what is wrong with it.
        book.set(f"ready/{mine.rank}", "")
    if refusal and not owner:
        raise RequestError(refusal)
    present: set[int] = set()
    ready: set[int] = set()
    while (verdict := _verdict(book)) is None:
        if owner and mine.rank == 0 and len(_arrived(book, mine.world_size, ready)) == mine.world_size:
            _settle(book, Verdict(machines=_machines(book, mine.world_size)))
            continue
        if wait.left_s <= 0:
            refused = _too_late(book, meeting, mine, present, wait.timeout_s)
            _settle(book, Verdict(refusal=refused, timed_out=True))
            continue
        wait.pause(lambda: _roll(book, mine.world_size, present))
    if not refusal and not verdict.refusal:
        return verdict
    _leave_refused(book, meeting, mine)
    if verdict.timed_out and not refusal:
        raise JoinTimeoutError(verdict.refusal)
    raise RequestError(refusal or verdict.refusal)


def _enter(book: Store, meeting: Meeting, mine: Claim) -> tuple[str, bool]:
    """Write this process's claims; return what is wrong with them, and whether the rank is ours.

    Each claim is one compare-and-set, so of two processes exactly one is told of the other.
    """
    founder = _take(book, "founder", mine)
    holder = _take(book, f"rank/{mine.rank}", mine)
    owner = holder == mine
    if not owner:
        return _left_over(meeting, holder, mine) or (
            f"rank {mine.rank} is claimed twice: by {holder.whom} and by {mine.whom}"
            + (f", or {meeting.file} is left from an earlier run" if meeting.file else "")
        ), owner
    if founder.world_size != mine.world_size:
        return _left_over(meeting, founder, mine) or (
            f"ranks disagree on the world size: {founder.world_size} says rank {founder.rank} ({founder.whom}), "
            f"{mine.world_size} says rank {mine.rank} ({mine.whom})"
        ), owner
    if founder.identity != mine.identity:
        return _left_over(meeting, founder, mine) or (
            f"ranks of two runs meet at {meeting.url}: {founder.identity!r} is rank {founder.rank} ({founder.whom}), "
            f"{mine.identity!r} is rank {mine.rank} ({mine.whom})"
        ), owner
    if mine.device:
        other = _take(book, f"device/{mine.device}", mine)
        if other != mine:
            return (
                f"ranks {other.rank} and {mine.rank} ({other.whom}, {mine.whom}) use one GPU, {mine.device}; "
                "give every rank its own, or allow it with --share-devices"
            ), owner
    return "", owner


def _take(book: Store, key: str, mine: Claim) -> Claim:
    """Claim a key; return who holds it."""
    text = msgspec.json.encode(mine).decode()
    return msgspec.json.decode(book.compare_set(key, "", text), type=Claim)


def _left_over(meeting: Meeting, holder: Claim, mine: Claim) -> str:
    """Say that the file is from an earlier run, where the other process is known to have ended."""
    if meeting.file is None or holder.place != mine.place or holder.pid == mine.pid:
        return ""
    if Path(f"/proc/{holder.pid}").exists():
        return ""
    return (
        f"{meeting.file} is left from an earlier run (rank {holder.rank}, {holder.whom}, which has ended): "
        "delete it, or name a file that does not exist yet"
    )


def _closed(meeting: Meeting, mine: Claim, verdict: Verdict) -> str:
    """Say why there is nothing to join any more."""
    if verdict.refusal:
        return verdict.refusal + (
            f" (so says {meeting.file}; delete it before the next attempt)" if meeting.file else ""
        )
    if meeting.file is not None:
        return (
            f"{meeting.file} is left from an earlier run, or in use by another one: "
            "delete it, or name a file that does not exist yet"
        )
    return f"rank {mine.rank} ({mine.whom}) came to {meeting.url} after all {mine.world_size} ranks had joined"


def _verdict(book: Store) -> Verdict | None:
    return msgspec.json.decode(book.get("verdict"), type=Verdict) if book.check(["verdict"]) else None


def _settle(book: Store, verdict: Verdict) -> None:
    """Propose a verdict; the first one counts."""
    book.compare_set("verdict", "", msgspec.json.encode(verdict).decode())


def _arrived(book: Store, world_size: int, ready: set[int]) -> set[int]:
    """Add to ``ready`` until the first rank that is not: cheap, and enough to know when all are."""
    for rank in range(world_size):
        if rank in ready:
            continue
        if not book.check([f"ready/{rank}"]):
            break
        ready.add(rank)
    return ready


def _roll(book: Store, world_size: int, present: set[int]) -> tuple[list[int], list[int]]:
    present.update(rank for rank in range(world_size) if rank not in present and book.check([f"rank/{rank}"]))
    return sorted(present), [rank for rank in range(world_size) if rank not in present]


def _holder(book: Store, rank: int) -> Claim:
    return msgspec.json.decode(book.get(f"rank/{rank}"), type=Claim)


def _machines(book: Store, world_size: int) -> list[Machine]:
    found: dict[str, Machine] = {}
    for rank in range(world_size):
        holder = _holder(book, rank)
        found.setdefault(holder.network, Machine(host=holder.host, ranks=[])).ranks.append(rank)
    return list(found.values())


def _too_late(book: Store, meeting: Meeting, mine: Claim, present: set[int], timeout_s: float) -> str:
    joined, missing = _roll(book, mine.world_size, present)
    if not missing:
        return f"rank 0 did not declare the group complete within {timeout_s:g} s at {meeting.url}"
    here = ", ".join(f"{rank} ({_holder(book, rank).whom})" for rank in joined[:16])
    more = f" and {len(joined) - 16} more" if len(joined) > 16 else ""
    return (
        f"{span(missing)} of {mine.world_size} did not join within {timeout_s:g} s "
        f"at {meeting.url}; joined: {here}{more}"
    )


def _leave_refused(book: Store, meeting: Meeting, mine: Claim) -> None:
    """Tell that this rank has read the refusal, and stay until all have, where the store would go with this rank.

    It is in rank 0's process, which is ended when another rank of its machine has failed.
    """
    # Whoever reads late may find the store gone, and knows nevertheless why there is no group.
    with contextlib.suppress(RuntimeError):
        book.set(f"read/{mine.rank}", "")
        joined, _ = _roll(book, mine.world_size, set())
        if mine.rank != 0 and (0 not in joined or _holder(book, 0).network != mine.network):
            return
        deadline = time.monotonic() + LINGER_S
        while not book.check([f"read/{rank}" for rank in joined]) and time.monotonic() < deadline:
            time.sleep(0.005)
    if mine.rank == 0:
        clear_away(meeting)
