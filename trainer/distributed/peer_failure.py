"""Peer failure: ranks on several machines tell each other through the store who broke the group.

Gloo names the neighbour whose connection ended, which is often one more victim, or a time-out and nobody. Here every
rank that notices leaves a word in the store, and who has left none is whom the others have lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.distributed.rendezvous import RankMachine, span
from trainer.distributed.store import RendezvousStore
from trainer.host.addresses import is_interface_up
from trainer.host.connections import own_connections
from trainer.host.ports import outgoing_ports

PREFIX = "gputrain-part"

SAY_S = 0.5
"""How long a rank tries to leave its word: the way to the store may be what is lost."""
LINGER_S = 0.5
"""How much longer rank 0, whose process keeps the store, lets the others read."""
LISTEN_S = 4.0
"""How long a rank waits for the others' words at most."""
QUIET_S = 1.5
"""Who has said nothing for so long after the last word will not: all notice within moments of the first."""


class PeerReport(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a rank says at its end."""

    failure: str = ""
    """What went wrong in this rank; empty when it has only lost others."""


def report_failure(rdzv: RendezvousStore, rank: int, failure: str) -> None:
    """Leave word that this rank has failed, for those who lose it."""
    _within(SAY_S, lambda: _leave(_store(rdzv), rank, failure))


def ask_peers(rdzv: RendezvousStore, machines: Sequence[RankMachine], rank: int, interface: str | None) -> str:
    """Say that this rank has lost others, and return in a few words whom and why.

    The group cannot be used afterwards.
    """
    heard: dict[int, PeerReport] = {}
    everybody = sum(len(machine.ranks) for machine in machines)

    def listen() -> None:
        keys = _store(rdzv)
        _leave(keys, rank, "")
        _close_connections(rdzv.port)
        deadline = time.monotonic() + LISTEN_S
        quiet_at = time.monotonic() + QUIET_S
        while len(heard) < everybody and time.monotonic() < min(deadline, quiet_at):
            for other in range(everybody):
                if other not in heard and keys.check([str(other)]):
                    heard[other] = msgspec.json.decode(keys.get(str(other)), type=PeerReport)
                    quiet_at = time.monotonic() + QUIET_S
            time.sleep(0.02)

    over = _within(LISTEN_S + SAY_S, listen)
    if rank == 0:
        time.sleep(LINGER_S)
    # Rank 0's process keeps the store: when it has spoken, and the store then goes, it has only left.
    return attribute_failure(machines, dict(heard), rank=rank, in_touch=over or 0 in heard, down=_is_down(interface))


def attribute_failure(
    machines: Sequence[RankMachine], heard: dict[int, PeerReport], *, rank: int, in_touch: bool, down: str
) -> str:
    """Say whom a rank has lost.

    Args:
        machines: who was in the group.
        heard: what ranks have said.
        rank: who has lost them.
        in_touch: whether the store answered to the end.
        down: this machine's interface, where it is down.
    """
    mine = next(machine for machine in machines if rank in machine.ranks)
    told = {other: word.failure for other, word in heard.items() if word.failure}
    if told:
        first = min(told)
        host = next(machine.host for machine in machines if first in machine.ranks)
        return f"rank {first} on {host} failed: {told[first]}"
    if down:
        return f"{mine.host} has lost the others: its interface {down} is down"
    if not in_touch and mine is not machines[0]:
        # The store is rank 0's.
        return f"{machines[0].name} is gone, or out of reach from {mine.host}"
    silent = [RankMachine(host=m.host, ranks=[r for r in m.ranks if r not in heard and r != rank]) for m in machines]
    lost = [machine for machine in silent if machine.ranks]
    if not lost:
        return ""
    names = ", ".join(f"{span(machine.ranks)} on {machine.host}" for machine in lost[:4])
    more = f" and of {len(lost) - 4} more machines" if len(lost) > 4 else ""
    return f"no word from {names}{more}"


def _store(rdzv: RendezvousStore) -> Store:
    return PrefixStore(PREFIX, rdzv.store)


def _leave(keys: Store, rank: int, failure: str) -> None:
    keys.compare_set(str(rank), "", msgspec.json.encode(PeerReport(failure=failure)).decode())


def _within(limit_s: float, act: Callable[[], None]) -> bool:
    """Act on a thread that is left behind when it takes too long; whether it came to its end.

    A store whose machine is out of reach answers after many minutes, and nothing can interrupt the question.
    """
    ended = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            act()
            ended.append(True)

    thread = threading.Thread(target=run, name="parting", daemon=True)
    thread.start()
    thread.join(limit_s)
    return bool(ended)


def _close_connections(store_port: int | None) -> None:
    """End this process's connections to other ranks, so that those notice which still wait for it.

    Gloo lets the kernel choose the ports at both ends. A connection to a service, as a script's own logger may hold
    one for its log tail, has the service's port at the other end and is left alone.
    """
    low, high = outgoing_ports()
    for connection in own_connections():
        with contextlib.suppress(OSError):
            ports = (connection.getpeername()[1], connection.getsockname()[1])
            if store_port not in ports and all(low <= port <= high for port in ports):
                connection.shutdown(socket.SHUT_RDWR)


def _is_down(interface: str | None) -> str:
    """Return the interface if the kernel says that nothing can be sent over it."""
    if not interface or interface == "lo":
        return ""
    return "" if is_interface_up(interface) else interface
