"""Notices that another machine is gone while this rank waits where no Python exception comes: in NCCL or on a GPU.

One rank of each machine counts in the store, on a thread, and reads the others' counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.distributed.peer_failure import PEER_FAILURE_PREFIX, PeerReport, run_with_timeout
from trainer.distributed.rendezvous import RankMachine

PREFIX = "gputrain-heartbeat"
LEFT = "left"
"""In place of a count: the machine's ranks have left in order."""
INTERVAL_S = 5.0
"""Time between two heartbeats of a node."""
BEAT_TIMEOUT_S = 10.0
"""Of all questions of one beat: a store that is out of reach answers after many minutes."""
LOST_S = 60.0
"""Silence after which a machine is lost: far longer than a pause of a virtual machine or a switch that restarts."""


class Heartbeat:
    """One machine's part; ``beat`` is called every few seconds.

    Args:
        store: of the rendezvous.
        machines: of all ranks.
        here: index of this machine.
        now: seconds.
        timeout_s: of the questions of one beat.
    """

    def __init__(
        self,
        store: Store,
        machines: Sequence[RankMachine],
        here: int,
        *,
        now: Callable[[], float] = time.monotonic,
        timeout_s: float = BEAT_TIMEOUT_S,
    ) -> None:
        self._keys = PrefixStore(PREFIX, store)
        self._reports = PrefixStore(PEER_FAILURE_PREFIX, store)
        self._machines = machines
        self._here = here
        self._now = now
        self._timeout_s = timeout_s
        self._count = 0
        self._heard = {index: (b"", now()) for index in range(len(machines)) if index != here}
        """The last count of each other machine, and when it changed."""

    def beat(self) -> str:
        """Count, and return in words which machine is lost; empty while none is."""
        self._count += 1
        failed: list[str] = []
        answered = run_with_timeout(self._timeout_s, lambda: failed.extend(self._exchange()))
        if failed:
            return failed[0]
        now = self._now()
        silent = [index for index, (count, since) in self._heard.items() if _is_lost(count, now - since)]
        if not silent:
            return ""
        machines = self._machines
        if not answered and self._here != 0:
            return f"{machines[0].name} is gone, or out of reach from {machines[self._here].host}"
        return f"no sign of life from {', '.join(machines[index].name for index in silent[:4])} for {LOST_S:g} s"

    def leave(self) -> None:
        """Tell the others that this machine's silence is no loss."""
        run_with_timeout(self._timeout_s, lambda: self._keys.set(str(self._here), LEFT))

    def _exchange(self) -> list[str]:
        """Write this machine's count and read the others'; return the failures that ranks have reported."""
        self._keys.set(str(self._here), str(self._count))
        for index, (count, _) in list(self._heard.items()):
            if self._keys.check([str(index)]) and (found := self._keys.get(str(index))) != count:
                self._heard[index] = found, self._now()
        failed = []
        for index, machine in enumerate(self._machines):
            for rank in machine.ranks:
                if index != self._here and self._reports.check([str(rank)]):
                    report = msgspec.json.decode(self._reports.get(str(rank)), type=PeerReport)
                    if report.failure:
                        failed.append(f"rank {rank} on {machine.host} failed: {report.failure}")
        return failed


def start(heartbeat: Heartbeat, on_lost: Callable[[str], None]) -> Callable[[], None]:
    """Beat on a thread until a machine is lost, which ``on_lost`` is told on that thread; return what ends it."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(INTERVAL_S):
            lost = heartbeat.beat()
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
