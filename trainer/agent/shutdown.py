"""Brings the ranks of a node to their end: in order, at once, or because one of them has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from trainer.agent.worker_process import WorkerProcess
from trainer.contract.outcome import SAVE_TIMEOUT_S
from trainer.contract.record import Failure
from trainer.host.stop_signals import AT_ONCE, StopSignals

GRACE_S = 1.5
"""From the signal that ends a rank to SIGKILL."""
SETTLE_S = 1.0
"""How long the node waits for the cause when a rank says no more than that a peer is gone."""
EXIT_S = 20.0
"""How long a rank's process may take to end after its training is complete."""
GIVE_UP_S = 5.0
"""How long a killed process may take to end; longer is one that the kernel cannot end."""


class Shutdown:
    """What has been asked of the ranks, and until when they may take."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self.stopped = False
        """Whether somebody asked for the end before anything failed."""
        self.unanswered: list[int] = []
        """Ranks that were asked to stop and did not answer in time."""
        self.kill_at: float | None = None
        """When ranks that were asked to end are killed, on the monotonic clock."""
        self._settle_until: float | None = None
        self._killed_at: float | None = None
        self._answer_until: float | None = None
        """When ranks that were asked to stop and have not answered are killed."""
        self._save_until: float | None = None
        """When ranks that have answered are killed."""

    def stop(self, ranks: Sequence[WorkerProcess], grace_s: float = GRACE_S) -> None:
        """End all ranks now; those that a signal does not end are killed after a grace."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + grace_s
            for rank in ranks:
                # To a rank that can keep its work SIGTERM is no more than a wish.
                rank.signal(AT_ONCE if rank.listens else signal.SIGTERM)

    def _obey(self, running: Sequence[WorkerProcess], now: float) -> None:
        """Stop because somebody asked for it: in order where every rank can, at once where one cannot or must not."""
        self.stopped = True
        grace_s = running[0].assignment.distributed.stop_grace
        busy = [rank for rank in running if rank.finished_at is None and rank.stopped is None]
        if self._signals.at_once:
            if self.kill_at is not None:
                self.kill_at = min(self.kill_at, now + GRACE_S)
            self.stop(running)
        elif running[0].assignment.is_script:
            # A script hears a signal or nothing; one that saves on SIGTERM has the time for it.
            if self.kill_at is None:
                for rank in busy:
                    rank.ask_to_stop()
            self.stop(running, grace_s)
        elif not all(rank.listens for rank in busy):
            self.stop(running)
        elif self._answer_until is None:
            self._answer_until, self._save_until = now + grace_s, now + grace_s + SAVE_TIMEOUT_S
            for rank in busy:
                rank.ask_to_stop()
        elif now >= self._answer_until and self.kill_at is None:
            self.unanswered = [rank.assignment.rank for rank in busy if not rank.stopping]
            assert self._save_until is not None
            if self.unanswered or now >= self._save_until:
                self.kill_at = now

    def act(self, running: Sequence[WorkerProcess], failures: Sequence[tuple[int, Failure]], now: float) -> bool:
        """Do what is due; True when nothing that is left can be waited for.

        Args:
            running: the ranks that have not ended; there is one.
            failures: what has failed so far.
            now: monotonic seconds.
        """
        if self._signals.requested is not None and not failures:
            self._obey(running, now)
        elif failures and self.kill_at is None:
            if any(failure.kind != "lost_peer" for _, failure in failures):
                self.stop(running)
            elif self._settle_until is None:
                self._settle_until = now + SETTLE_S
            elif now >= self._settle_until:
                self.stop(running)
        for rank in running:
            if rank.done_at is not None and now >= rank.done_at + EXIT_S:
                rank.signal(signal.SIGKILL)
        if self.kill_at is None or now < self.kill_at:
            return False
        if self._killed_at is None:
            self._killed_at = now
            for rank in running:
                rank.signal(signal.SIGKILL)
        return now >= self._killed_at + GIVE_UP_S

    def due_in_s(self, running: Sequence[WorkerProcess]) -> float | None:
        """Return how long nothing is to be done; None for as long as nothing happens."""
        due = [rank.done_at + EXIT_S for rank in running if rank.done_at is not None]
        due += [moment for moment in (self.kill_at, self._settle_until) if moment is not None]
        answers = (self._answer_until, self._save_until)
        due += [moment for moment in answers if moment is not None and moment > time.monotonic()]
        if self._killed_at is not None:
            due = [self._killed_at + GIVE_UP_S]
        # An exit that is overdue is looked for again and again until it has happened.
        return max(min(due) - time.monotonic(), 0.05) if due else None
