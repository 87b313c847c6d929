"""How the ranks of a run find each other, and how they learn who is missing, double or from another run.

A process group's own joining waits in silence and names nobody. Here every rank claims its number in a store,
rank 0 declares the group complete or anybody declares it impossible, and all ranks end with the same words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.errors import RequestError, TrainingError
from trainer.group.stores import BOOK, JoinTimeoutError, Meeting, Wait, clear_away, is_loopback

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
    """Equal for processes that reach each other through the loopback interface and see each other's pids."""
    device: str = ""
    """UUID of the GPU; empty on a CPU or where sharing is allowed."""

    @property
    def whom(self) -> str:
        """The process, for a message."""
        return f"pid {self.pid} on {self.host}"


class Verdict(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How the joining ended, the same for all ranks."""

    refusal: str = ""
    """Why there will be no group; empty when there is one."""
    timed_out: bool = False
    one_place: bool = False
    """Whether all ranks can meet through the loopback interface."""


def claim(*, rank: int, world_size: int, identity: str, device: str = "") -> Claim:
    """Return this process's claim to a rank."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = [Path("/proc/self/ns/net"), Path("/proc/self/ns/pid")]
    place = [boot.read_text().strip()] if boot.exists() else [socket.gethostname()]
    place += [str(space.stat().st_ino) for space in spaces if space.exists()]
    return Claim(
        rank=rank,
        world_size=world_size,
        identity=identity,
        host=socket.gethostname(),
        pid=os.getpid(),
        place="/".join(place),
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
    if refusal and not owner:
        raise RequestError(refusal)
    present: set[int] = set()
    while (verdict := _verdict(book)) is None:
        if owner and mine.rank == 0 and len(_arrived(book, mine.world_size, present)) == mine.world_size:
            _settle(book, Verdict(one_place=_share_a_place(book, mine.world_size)))
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


def _arrived(book: Store, world_size: int, present: set[int]) -> set[int]:
    """Add to ``present`` until the first missing rank: cheap, and enough to know when all are there."""
    for rank in range(world_size):
        if rank in present:
            continue
        if not book.check([f"rank/{rank}"]):
            break
        present.add(rank)
    return present


def _roll(book: Store, world_size: int, present: set[int]) -> tuple[list[int], list[int]]:
    present.update(rank for rank in range(world_size) if rank not in present and book.check([f"rank/{rank}"]))
    return sorted(present), [rank for rank in range(world_size) if rank not in present]


def _holder(book: Store, rank: int) -> Claim:
    return msgspec.json.decode(book.get(f"rank/{rank}"), type=Claim)


def _share_a_place(book: Store, world_size: int) -> bool:
    return len({_holder(book, rank).place for rank in range(world_size)}) == 1


def _too_late(book: Store, meeting: Meeting, mine: Claim, present: set[int], timeout_s: float) -> str:
    joined, missing = _roll(book, mine.world_size, present)
    if not missing:
        return f"rank 0 did not declare the group complete within {timeout_s:g} s at {meeting.url}"
    here = ", ".join(f"{rank} ({_holder(book, rank).whom})" for rank in joined[:16])
    more = f" and {len(joined) - 16} more" if len(joined) > 16 else ""
    plural = "s" if len(missing) > 1 else ""
    return (
        f"rank{plural} {', '.join(map(str, missing))} of {mine.world_size} did not join within {timeout_s:g} s "
        f"at {meeting.url}; joined: {here}{more}"
    )


def _leave_refused(book: Store, meeting: Meeting, mine: Claim) -> None:
    """Tell that this rank has read the refusal; rank 0 keeps the store until all have, then clears it away."""
    # Whoever reads late may find the store gone, and knows nevertheless why there is no group.
    with contextlib.suppress(RuntimeError):
        book.set(f"read/{mine.rank}", "")
    if mine.rank != 0:
        return
    deadline = time.monotonic() + LINGER_S
    joined, _ = _roll(book, mine.world_size, set())
    while not book.check([f"read/{rank}" for rank in joined]) and time.monotonic() < deadline:
        time.sleep(0.005)
    clear_away(meeting)


# ------------------------------------------------------------------------------------------------------ the network


def gloo_interface(meeting: Meeting, verdict: Verdict) -> str | None:
    """Return the interface for gloo, or None where its own choice is as good as ours.

    Left alone, gloo takes the address that the machine's own name resolves to, which on many machines is the
    loopback's: ranks of other machines then wait in vain.
    """
    names = [name for _, name in socket.if_nameindex()]
    if verdict.one_place:
        return "lo" if "lo" in names else None
    if meeting.host is None:
        return None
    address = _address_towards(meeting.host)
    if address is None or is_loopback(address):
        return None
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return None


def _address_towards(host: str) -> str | None:
    """Return this machine's address on the way to the host; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    return None
