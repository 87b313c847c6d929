"""Detect the loss of another machine while this rank waits in NCCL or on a GPU, where no Python exception is raised.

One rank of each machine increments its machine's count in the store, on a thread, and reads the counts of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.distributed.peer_failure import PEER_FAILURE_PREFIX, read_report, run_with_timeout
from trainer.distributed.rendezvous import RankMachine

PREFIX = "gputrain-heartbeat"
LEFT = "left"
"""Value in place of a count once the machine's ranks have left the group in order."""
INTERVAL_S = 5.0
"""Time between two heartbeats of a node."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Time-out for all store requests of one heartbeat: an unreachable store fails only after many minutes."""
LOST_S = 60.0
"""Time without a new count after which a machine is lost: far longer than the pause of a virtual machine or the
restart of a switch."""


class Heartbeat:
    """Heartbeat of one machine; ``exchange`` is called every few seconds.

    ``own`` is the index of this machine, ``now`` a monotonic clock in seconds.
    """

    def __init__(
        self, store: Store, machines: Sequence[RankMachine], own: int, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = PrefixStore(PREFIX, store)
        self._reports = PrefixStore(PEER_FAILURE_PREFIX, store)
        self._machines = machines
        self._own = own
        self._now = now
        self._count = 0
        self._seen = {index: (b"", now()) for index in range(len(machines)) if index != own}
        """Last count of each other machine, and the time of its last change."""

    def exchange(self) -> str:
        """Exchange counts; return a description of the lost machine or failed rank, empty while there is none."""
        self._count += 1
        failed: list[str] = []
        answered = run_with_timeout(HEARTBEAT_TIMEOUT_S, lambda: failed.extend(self._exchange()))
        if failed:
            return failed[0]
        now = self._now()
        silent = [index for index, (count, since) in self._seen.items() if _is_lost(count, now - since)]
        if not silent:
            return ""
        machines = self._machines
        if not answered and self._own != 0:
            return f"{machines[0].name} is down, or cannot be reached from {machines[self._own].host}"
        return f"no heartbeat from {', '.join(machines[index].name for index in silent[:4])} for {LOST_S:g} s"

    def leave(self) -> None:
        """Write that this machine has left in order, so that the others do not count its silence as a loss."""
        run_with_timeout(HEARTBEAT_TIMEOUT_S, lambda: self._keys.set(str(self._own), LEFT))

    def _exchange(self) -> list[str]:
        """Write this machine's count and read those of the others; return the failures that ranks have reported."""
        self._keys.set(str(self._own), str(self._count))
        for index, (count, _) in list(self._seen.items()):
            if self._keys.check([str(index)]) and (latest := self._keys.get(str(index))) != count:
                self._seen[index] = latest, self._now()
        others = [machine for index, machine in enumerate(self._machines) if index != self._own]
        return [
            f"rank {rank} on {machine.host} failed: {failure}"
            for machine in others
            for rank in machine.ranks
            if self._reports.check([str(rank)]) and (failure := read_report(self._reports, rank))
        ]


def start(heartbeat: Heartbeat, on_lost: Callable[[str], None]) -> Callable[[], None]:
    """Exchange heartbeats on a thread until a machine is lost, then call ``on_lost``; return the function to end it."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(INTERVAL_S):
            lost = heartbeat.exchange()
            if ended.is_set():
                return
            if lost:
                on_lost(lost)
                return

    def leave() -> None:
        ended.set()
        heartbeat.leave()

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
    return leave


def _is_lost(count: bytes, silence_s: float) -> bool:
    return count != LEFT.encode() and silence_s >= LOST_S
