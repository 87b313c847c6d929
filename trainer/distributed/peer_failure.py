"""Report failures between machines through the store, and find the ranks that were lost.

Gloo reports the neighbour whose connection ended, which is often one more victim, or only a time-out. Therefore every
rank whose collective failed writes a report into the store; the ranks without a report are lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.errors import ranks_text
from trainer.distributed.rendezvous import RankMachine
from trainer.distributed.store import RendezvousStore
from trainer.host.addresses import is_interface_up
from trainer.host.ports import outgoing_ports, own_connections

PEER_FAILURE_PREFIX = "gputrain-peer-failure"
"""Prefix of the reports in the store."""
ANY_REPORT = "any"
"""Key that is set once any rank has reported a failure of its own."""

REPORT_TIMEOUT_S = 0.5
"""Time-out for writing a report: the connection to the store may be lost too."""
COLLECT_TIMEOUT_S = 4.0
"""Time-out for the reports of the other ranks."""


def report_failure(rdzv: RendezvousStore, rank: int, failure: str) -> None:
    """Write the failure of this rank into the store, for the ranks that lose it."""
    run_with_timeout(REPORT_TIMEOUT_S, lambda: _write_report(_store(rdzv), rank, failure))


def describe_lost_peers(
    rdzv: RendezvousStore, machines: Sequence[RankMachine], rank: int, interface: str | None
) -> str:
    """Report that this rank has lost others, collect the reports of all, and describe which ranks were lost and why.

    The group cannot be used afterwards.
    """
    reports: dict[int, str] = {}
    world_size = sum(len(machine.ranks) for machine in machines)

    def collect() -> None:
        keys = _store(rdzv)
        _write_report(keys, rank, "")
        _close_connections(rdzv.port)
        deadline = time.monotonic() + COLLECT_TIMEOUT_S
        # No more reports are expected this long after the last: all ranks notice a failure at almost the same time.
        collect_idle_s = 1.5
        idle_at = time.monotonic() + collect_idle_s
        while len(reports) < world_size and time.monotonic() < min(deadline, idle_at):
            for other in range(world_size):
                if other not in reports and keys.check([str(other)]):
                    reports[other] = read_report(keys, other)
                    idle_at = time.monotonic() + collect_idle_s
            time.sleep(0.02)

    store_answered = run_with_timeout(COLLECT_TIMEOUT_S + REPORT_TIMEOUT_S, collect)
    store_linger_s = 0.5  # time for which rank 0, whose process serves the store, waits for the others to read it
    if rank == 0:
        time.sleep(store_linger_s)
    # Rank 0's process serves the store: a store that ends after rank 0's report was closed, not lost.
    return attribute_failure(
        machines,
        dict(reports),
        rank=rank,
        store_answered=store_answered or 0 in reports,
        interface_down="" if interface in (None, "", "lo") or is_interface_up(interface) else interface,
    )


def attribute_failure(
    machines: Sequence[RankMachine], reports: dict[int, str], *, rank: int, store_answered: bool, interface_down: str
) -> str:
    """Describe the ranks that a rank has lost, or the first failure reported; empty when no rank is missing."""
    mine = next(machine for machine in machines if rank in machine.ranks)
    failures = {other: failure for other, failure in reports.items() if failure}
    if failures:
        first = min(failures)
        host = next(machine.host for machine in machines if first in machine.ranks)
        return f"rank {first} on {host} failed: {failures[first]}"
    if interface_down:
        return f"{mine.host} has lost the other machines: its interface {interface_down} is down"
    if not store_answered and mine is not machines[0]:
        # The store is rank 0's.
        return f"{machines[0].name} is down, or cannot be reached from {mine.host}"
    silent = [RankMachine(host=m.host, ranks=[r for r in m.ranks if r not in reports and r != rank]) for m in machines]
    lost = [machine for machine in silent if machine.ranks]
    if not lost:
        return ""
    names = ", ".join(f"{ranks_text(machine.ranks)} on {machine.host}" for machine in lost[:4])
    more = f" and of {len(lost) - 4} more machines" if len(lost) > 4 else ""
    return f"no report from {names}{more}"


def _store(rdzv: RendezvousStore) -> Store:
    return PrefixStore(PEER_FAILURE_PREFIX, rdzv.store)


def _write_report(keys: Store, rank: int, failure: str) -> None:
    keys.compare_set(str(rank), "", msgspec.json.encode(failure).decode())
    if failure:
        keys.set(ANY_REPORT, "")


def read_report(keys: Store, rank: int) -> str:
    """Return the failure that a rank has reported; empty if it has only lost others."""
    return msgspec.json.decode(keys.get(str(rank)), type=str)


def run_with_timeout(limit_s: float, act: Callable[[], None]) -> bool:
    """Run a function on a thread and give up after ``limit_s``; return whether it returned in time.

    A request to an unreachable store fails only after many minutes, and nothing can interrupt it.
    """
    ended = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            act()
            ended.append(True)

    thread = threading.Thread(target=run, name="peer-failure", daemon=True)
    thread.start()
    thread.join(limit_s)
    return bool(ended)


def _close_connections(store_port: int | None) -> None:
    """Shut down this process's connections to other ranks, so that ranks still waiting for it fail too.

    Gloo lets the kernel choose the ports at both ends. A connection to a service, such as that of a script's own
    logger, has the service's port at the other end and is left alone.
    """
    low, high = outgoing_ports()
    for connection in own_connections():
        with contextlib.suppress(OSError):
            ports = (connection.getpeername()[1], connection.getsockname()[1])
            if store_port not in ports and all(low <= port <= high for port in ports):
                connection.shutdown(socket.SHUT_RDWR)
