"""How the ranks of a run find each other, and how they learn who is missing, double or from another run.

A process group's own joining waits in silence and names nobody. Here every rank claims its number in a store,
rank 0 declares the group complete or anybody declares it impossible, and all ranks end with the same words.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
from torch.distributed import DistError, DistNetworkError
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.errors import RequestError, TrainingError

Waiting = Callable[[list[int], list[int], float], None]
"""Called about once a second while ranks are missing: joined ranks, missing ranks, milliseconds waited."""

REPORT_EVERY_S = 1.0
LINGER_S = 1.0
"""How long rank 0 keeps the store open after a refusal, so that the others read it."""

_SETTLING_S = 2.0
"""Within this a rank that has just created a file has written its claim into it."""
_BOOK = "gputrain-join"


class JoinTimeoutError(TrainingError):
    """Not all ranks came in time; the message names the missing ones."""


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


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet: the store, and what must be cleared away at the end."""

    store: Store
    url: str
    file: Path | None = None
    """The store's file, which rank 0 removes."""
    host: str | None = None
    """Host of the store, for choosing the network interface."""


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


# ------------------------------------------------------------------------------------------------------- the store


def open_store(
    url: str, mine: Claim, *, timeout_s: float, on_waiting: Waiting | None, environ: Mapping[str, str]
) -> Meeting:
    """Open the store that the init method names; rank 0 serves a ``tcp://`` one.

    Raises:
        RequestError: the init method cannot be used here, its port is in use or its file is from an earlier run.
        JoinTimeoutError: nobody answered in time.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return _open_file(url, mine)
    serve = mine.rank == 0
    if scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise RequestError(f"env:// needs {' and '.join(missing)} in the environment")
        rest = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        # torchrun's agent serves the store itself, and keeps it over restarts.
        serve = serve and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    elif scheme != "tcp":
        raise RequestError(f"init method {url!r}: allowed are tcp://HOST:PORT, file:///PATH and env://")
    host, port = _address(url, rest)
    store = _serve(url, host, port) if serve else None
    if store is None:
        store = _connect(url, host, port, mine, timeout_s=timeout_s, on_waiting=on_waiting)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(PrefixStore(f"attempt-{attempt}", store), url, host=host)


def _address(url: str, rest: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise RequestError(f"init method {url!r} ({rest}): expected HOST:PORT with a port from 1 to 65535")
    # One address family for the server and its clients, whatever the resolver prefers.
    host = "127.0.0.1" if host == "localhost" else host
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"init method {url!r}: host {host!r} cannot be resolved here ({error.strerror})") from None
    return host, port


def is_loopback(host: str) -> bool:
    """Whether the host names this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _serve(url: str, host: str, port: int) -> Store:
    """Listen and return the store; on a loopback host nobody outside this machine can reach it."""
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, port), family=family, backlog=2048)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", port), backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestError(f"init method {url!r}: port {port} is in use on this machine; choose another") from None
        raise RequestError(f"init method {url!r}: rank 0 cannot listen on port {port} ({error.strerror})") from None
    seconds = timedelta(seconds=10)
    try:
        # Through the address that the others use: a rank 0 on the wrong machine then meets the right one.
        return TCPStore(host, port, None, True, seconds, wait_for_workers=False, master_listen_fd=server.detach())
    except DistNetworkError:
        raise RequestError(
            f"init method {url!r}: rank 0 runs on {socket.gethostname()} and cannot reach itself at {host}:{port}; "
            "the host must be the machine of rank 0"
        ) from None


def _connect(url: str, host: str, port: int, mine: Claim, *, timeout_s: float, on_waiting: Waiting | None) -> Store:
    """Connect to rank 0's store, which may open minutes after this rank has started."""
    others = [rank for rank in range(mine.world_size) if rank != mine.rank]
    wait = _Wait(timeout_s, on_waiting)
    reason = "no attempt was made"
    while True:
        try:
            # A bare connection tells whether anybody listens; the store's own attempts are slow and noisy.
            socket.create_connection((host, port), timeout=max(min(5.0, wait.left_s), 0.1)).close()
            seconds = timedelta(seconds=max(min(10.0, wait.left_s), 1.0))
            return TCPStore(host, port, None, False, seconds, wait_for_workers=False)
        except OSError as error:
            reason = error.strerror or str(error)
        except DistError:
            reason = "what listens there is no store of a process group"
        if wait.left_s <= 0:
            raise JoinTimeoutError(
                f"rank {mine.rank} waited {timeout_s:g} s for rank 0 at {host}:{port} ({reason}); "
                f"missing: rank 0, which serves {url}"
            )
        wait.pause(lambda: ([mine.rank], others))


def _open_file(url: str, mine: Claim) -> Meeting:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute() or path == Path("/"):
        raise RequestError(f"init method {url!r}: expected file:///PATH with an absolute path")
    if not path.parent.is_dir():
        raise RequestError(f"init method {url!r}: the folder {path.parent} does not exist on {mine.host}")
    if path.is_dir():
        raise RequestError(f"init method {url!r}: {path} is a folder, expected a file that does not exist yet")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"init method {url!r}: {path} cannot be written on {mine.host}")
    _refuse_foreign_file(path)
    return Meeting(FileStore(str(path), -1), url, file=path)


def _refuse_foreign_file(path: Path) -> None:
    """Accept no file, an empty one, and one in which a rank has claimed its number.

    A peer creates the file a moment before its claim is in it, therefore a file without one gets that moment.
    """
    deadline = time.monotonic() + _SETTLING_S
    while True:
        try:
            with path.open("rb") as file:
                head = file.read(4096)
        except FileNotFoundError:
            return
        if not head or _BOOK.encode() in head:
            return
        if time.monotonic() > deadline:
            raise RequestError(f"{path} exists and is not empty: delete it, or name a file that does not exist yet")
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------- the joining


class _Wait:
    """A time-out, a pause that grows with the time already waited, and a report about once a second."""

    def __init__(self, timeout_s: float, on_waiting: Waiting | None) -> None:
        self.started = time.monotonic()
        self.timeout_s = timeout_s
        self._on_waiting = on_waiting
        self._reported = self.started

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        return self.timeout_s - self.waited_s

    def pause(self, who: Callable[[], tuple[list[int], list[int]]]) -> None:
        """Report who is there, if it is time, and sleep: 1 ms at first, a fiftieth of the wait later on."""
        now = time.monotonic()
        if self._on_waiting is not None and now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            joined, missing = who()
            self._on_waiting(joined, missing, self.waited_s * 1000)
        time.sleep(min(max(self.waited_s / 50, 0.001), 0.1, max(self.left_s, 0.001)))


def join(meeting: Meeting, mine: Claim, *, timeout_s: float, on_waiting: Waiting | None) -> Verdict:
    """Claim this process's rank and wait until every rank has claimed its own.

    Raises:
        RequestError: two processes claim one rank or one GPU, or disagree on the world size or the run; or the
            store's file is left from an earlier run.
        JoinTimeoutError: ranks are missing.
        TrainingError: the store went away.
    """
    book = PrefixStore(_BOOK, meeting.store)
    try:
        return _join(book, meeting, mine, timeout_s=timeout_s, on_waiting=on_waiting)
    except DistError as error:
        first = str(error).splitlines()[0]
        raise TrainingError(f"rank {mine.rank} lost rank 0's store at {meeting.url} while joining: {first}") from None


def _join(book: Store, meeting: Meeting, mine: Claim, *, timeout_s: float, on_waiting: Waiting | None) -> Verdict:
    if settled := _verdict(book):
        raise RequestError(_closed(meeting, mine, settled))
    refusal, owner = _enter(book, meeting, mine)
    if refusal:
        _settle(book, Verdict(refusal=refusal))
    wait = _Wait(timeout_s, on_waiting)
    present: set[int] = set()
    while (verdict := _verdict(book)) is None:
        if owner and mine.rank == 0 and len(_arrived(book, mine.world_size, present)) == mine.world_size:
            _settle(book, Verdict(one_place=_share_a_place(book, mine.world_size)))
            continue
        if wait.left_s <= 0:
            refused = _too_late(book, meeting, mine, present, timeout_s)
            _settle(book, Verdict(refusal=refused, timed_out=True))
            continue
        wait.pause(lambda: _roll(book, mine.world_size, present))
    if not refusal and not verdict.refusal:
        return verdict
    _leave_refused(book, meeting, mine, owner=owner)
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
    if meeting.file is not None:
        ended = f" that failed: {verdict.refusal}" if verdict.refusal else ""
        return (
            f"{meeting.file} is left from an earlier run, or in use by one{ended}; "
            "delete it, or name a file that does not exist yet"
        )
    if verdict.refusal:
        return verdict.refusal
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


def _leave_refused(book: Store, meeting: Meeting, mine: Claim, *, owner: bool) -> None:
    """Tell that this rank has read the refusal; rank 0 keeps the store until all have, then clears it away."""
    if not owner:
        return
    book.set(f"read/{mine.rank}", "")
    if mine.rank != 0:
        return
    deadline = time.monotonic() + LINGER_S
    joined, _ = _roll(book, mine.world_size, set())
    while not book.check([f"read/{rank}" for rank in joined]) and time.monotonic() < deadline:
        time.sleep(0.005)
    clear_away(meeting)


def clear_away(meeting: Meeting) -> None:
    """Remove the store's file, so that its name can be used again."""
    if meeting.file is not None:
        with contextlib.suppress(OSError):
            meeting.file.unlink(missing_ok=True)


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
