"""Heartbeats of machines through the store: which machines' ranks live, and their loss while this rank waits in NCCL.

One rank of each machine increments its machine's count in the store, on a thread, and reads the counts of the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.distributed.peer_failure import ANY_REPORT, PEER_FAILURE_PREFIX, read_report, run_with_timeout
from trainer.distributed.rendezvous import RankMachine

PREFIX = "gputrain-heartbeat"
LEFT = "left"
"""Value in place of a count once the machine's ranks have left the group in order."""
INTERVAL_S = 2.0
"""Time between two heartbeats of a machine, and time for which the store is waited for at each."""
UNHEARD_S = 5.0
"""Time without a new count after which a machine is unheard: two heartbeats."""
LOST_S = 60.0
"""Time without a new count and without a step after which a machine is lost: far longer than the pause of a virtual
machine or the restart of a switch."""


class Heartbeat:
    """Heartbeat of one machine; ``exchange`` is called every few seconds.

    Args:
        store: of the group.
        machines: of the group.
        own: index of this machine.
        step: returns the steps that this rank has done.
        now: a monotonic clock, seconds.
    """

    def __init__(
        self,
        store: Store,
        machines: Sequence[RankMachine],
        own: int,
        *,
        step: Callable[[], int | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = PrefixStore(PREFIX, store)
        self._reports = PrefixStore(PEER_FAILURE_PREFIX, store)
        self._machines = machines
        self._own = own
        self._step = step
        self._now = now
        self._count = 0
        self._seen = {index: (b"", now()) for index in range(len(machines)) if index != own}
        """Last count of each other machine, and the time of its last change."""
        self._stepped = step(), now()
        """The last step of this rank, and when it was first seen."""
        self._failed: list[str] = []
        """Failures that ranks of other machines have reported."""
        self._exchanging: threading.Thread | None = None
        """Asks the store, which fails only after many minutes if it cannot be reached."""
        self._answered = False
        """Whether the store has answered the last exchange."""

    def exchange(self) -> str:
        """Exchange counts; return a description of the lost machine or failed rank, empty while there is none."""
        if self._exchanging is None or not self._exchanging.is_alive():
            self._count, self._answered = self._count + 1, False
            self._exchanging = threading.Thread(target=self._exchange, name="heartbeat-store", daemon=True)
            self._exchanging.start()
        self._exchanging.join(INTERVAL_S)
        if self._failed:
            return self._failed[0]
        now = self._now()
        if (step := self._step()) != self._stepped[0]:
            self._stepped = step, now
        silent = self._silent_for(LOST_S)
        if not silent or now - self._stepped[1] < LOST_S:
            return ""
        machines = self._machines
        if self._own != 0 and not self._answered:  # the first machine serves the store
            return f"{machines[0].name} is down, or cannot be reached from {machines[self._own].host}"
        return f"no heartbeat from {', '.join(machines[index].name for index in silent[:4])} for {LOST_S:g} s"

    def unheard(self) -> list[int]:
        """Return the ranks of the machines that are unheard now."""
        return [rank for index in self._silent_for(UNHEARD_S) for rank in self._machines[index].ranks]

    def leave(self) -> None:
        """Write that this machine has left in order, so that the others do not count its silence as a loss."""
        run_with_timeout(INTERVAL_S, lambda: self._keys.set(str(self._own), LEFT))

    def _silent_for(self, seconds: float) -> list[int]:
        now, left = self._now(), LEFT.encode()
        return [index for index, (count, since) in self._seen.items() if count != left and now - since >= seconds]

    def _exchange(self) -> None:
        """Write this machine's count and read those of the others, and the failures that ranks have reported."""
        with contextlib.suppress(RuntimeError):  # a store that is gone
            self._keys.set(str(self._own), str(self._count))
            for index, (count, _) in list(self._seen.items()):
                if self._keys.check([str(index)]) and (latest := self._keys.get(str(index))) != count:
                    self._seen[index] = latest, self._now()
            any_failed = self._reports.check([ANY_REPORT])
            others = [machine for index, machine in enumerate(self._machines) if index != self._own]
            self._failed += [
                f"rank {rank} on {machine.host} failed: {failure}"
                for machine in others
                for rank in (machine.ranks if any_failed else ())
                if self._reports.check([str(rank)]) and (failure := read_report(self._reports, rank))
            ]
            self._answered = True


def start(
    heartbeat: Heartbeat, *, on_lost: Callable[[str], None] | None, on_unheard: Callable[[list[int]], None]
) -> Callable[[], None]:
    """Exchange heartbeats on a thread; return the function to end it.

    ``on_unheard`` is called with the ranks of unheard machines, after the first exchange and when they change;
    ``on_lost`` at the loss of a machine, which is the last exchange.
    """
    ended = threading.Event()

    def run() -> None:
        known: list[int] | None = None
        while not ended.wait(INTERVAL_S):
            lost = heartbeat.exchange()
            if ended.is_set():
                return
            if (unheard := heartbeat.unheard()) != known:
                known = unheard
                on_unheard(unheard)
            if lost and on_lost is not None:
                on_lost(lost)
                return

    def leave() -> None:
        ended.set()
        heartbeat.leave()

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
    return leave
