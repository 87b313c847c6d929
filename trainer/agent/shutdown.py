"""Shutdown of a node's ranks: after they have saved, at once, or because one of them has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from trainer.agent.worker_process import WorkerProcess
from trainer.contract.outcome import SAVE_TIMEOUT_S, answer_s
from trainer.contract.record import Failure
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import NOW_SIGNAL, StopRequest

TERMINATION_S = 1.5
"""Time from the signal that ends a rank to SIGKILL."""
PROCESS_EXIT_S = 20.0
"""Time-out of the end of a rank's process after its training is complete."""
KILLED_EXIT_S = 5.0
"""Time-out of the end of a killed process; one that takes longer cannot be ended by the kernel."""


class Shutdown:
    """Shutdown of the ranks: its state, and the deadlines of its steps."""

    def __init__(self, stop_request: StopRequest) -> None:
        self._stop_request = stop_request
        self.stopped = False
        """Whether there was a stop request before any failure."""
        self.unanswered: list[int] = []
        """Ranks that were asked to stop and did not answer in time."""
        self.killed: list[int] = []
        """Ranks of a script that had not ended on a stop request after ``stop_grace``, in which it may save."""
        self.kill_at: float | None = None
        """Time of SIGKILL to all ranks that have not ended, on the monotonic clock; None before a signal to end."""
        self._terminate_at: float | None = None
        """Time of SIGTERM to scripts, after NOW_SIGNAL has made them write their record."""
        self._started_terminated = False
        """Whether SIGTERM was sent to ranks that the script has started, and not yet to its own process."""
        self._cause_until: float | None = None
        """End of the wait for a root cause."""
        self._killed_at: float | None = None
        self._answer_until: float | None = None
        """Deadline for ranks to answer a stop request."""
        self._save_until: float | None = None
        """Deadline for ranks that have answered to save."""

    def stop(self, ranks: Sequence[WorkerProcess], grace_s: float = TERMINATION_S) -> None:
        """Send all ranks the signal that ends them, and SIGKILL after a grace."""
        # Time to write the rest of a script's record before SIGTERM, which may kill it before Python runs again.
        last_write_s = 0.2
        if self.kill_at is None:
            now = time.monotonic()
            self.kill_at = now + grace_s
            self._terminate_at = now + last_write_s
            for rank in ranks:
                if rank.by_script:  # it does not wait for the signal
                    rank.request_stop()
                    continue
                # A rank that can save treats SIGTERM as a stop request.
                has_record = rank.stoppable or rank.assignment.is_script
                rank.signal(NOW_SIGNAL if has_record else signal.SIGTERM)

    def _follow_stop_request(self, running: Sequence[WorkerProcess], now: float) -> None:
        """Forward the stop request and enforce its deadlines; above level SAVE, or if a rank cannot save, end all."""
        self.stopped = True
        grace_s = running[0].assignment.distributed.stop_grace
        busy = [rank for rank in running if rank.finished_at is None and rank.stopped is None]
        if self._stop_request.level > StopLevel.SAVE:
            if self.kill_at is not None:
                self.kill_at = min(self.kill_at, now + TERMINATION_S)
            self.stop(running)
        elif running[0].assignment.is_script:
            # A script gets the stop request as SIGTERM, and the grace if it saves on that.
            if self.kill_at is None:
                for rank in busy:
                    rank.request_stop()
            self.stop(running, grace_s)
        elif not all(rank.stoppable for rank in busy):
            self.stop(running)
        elif self._answer_until is None:
            grace_s = answer_s(grace_s, max(rank.step_s for rank in running))
            self._answer_until, self._save_until = now + grace_s, now + grace_s + SAVE_TIMEOUT_S
            for rank in busy:
                rank.request_stop()
        elif now >= self._answer_until and self.kill_at is None:
            self.unanswered = [rank.assignment.rank for rank in busy if not rank.stopping]
            assert self._save_until is not None
            if self.unanswered or now >= self._save_until:
                self.kill_at = now

    def act(self, running: Sequence[WorkerProcess], failures: Sequence[tuple[int, Failure]], now: float) -> bool:
        """Take the steps that are due for the ranks that have not ended; ``now`` is in monotonic seconds.

        Returns:
            True once killed ranks have had ``KILLED_EXIT_S`` to end.
        """
        cause_wait_s = 1.0  # time to wait for the report of the root cause after a rank has reported only a lost peer
        if self._stop_request.level and not failures:
            self._follow_stop_request(running, now)
        elif failures and self.kill_at is None:
            if any(failure.kind != "lost_peer" for _, failure in failures):
                self.stop(running)
            elif self._cause_until is None:
                self._cause_until = now + cause_wait_s
            elif now >= self._cause_until:
                self.stop(running)
        self._end_lingering(running, now)
        self._terminate_scripts(running, now)
        if self.kill_at is None or now < self.kill_at:
            return False
        if self._killed_at is None:
            self._killed_at = now
            if self.stopped and self._stop_request.level == StopLevel.SAVE and running[0].assignment.is_script:
                self.killed = [rank.assignment.rank for rank in running]
            for rank in running:
                rank.signal(signal.SIGKILL)
        return now >= self._killed_at + KILLED_EXIT_S

    def _end_lingering(self, running: Sequence[WorkerProcess], now: float) -> None:
        """Kill the processes that go on after their training is complete."""
        for rank in running:
            if rank.done_at is not None and now >= rank.done_at + PROCESS_EXIT_S and not rank.by_script:
                rank.signal(signal.SIGKILL)

    def _terminate_scripts(self, running: Sequence[WorkerProcess], now: float) -> None:
        """Send SIGTERM to scripts once they have written their record: first to the ranks that they have started."""
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at = None
            started = [rank for rank in running if rank.by_script]
            for rank in started or running:
                if rank.assignment.is_script:
                    rank.signal(signal.SIGTERM)
            self._started_terminated = bool(started)
        if self._started_terminated and not any(rank.by_script for rank in running):
            # Their parent comes last: with it, torch's launcher interrupts those that save.
            self._started_terminated = False
            for rank in running:
                rank.signal(signal.SIGTERM)

    def due_in_s(self, running: Sequence[WorkerProcess]) -> float | None:
        """Return the seconds until ``act`` is due; None if only a report or the end of a rank makes it due."""
        due = [rank.done_at + PROCESS_EXIT_S for rank in running if rank.done_at is not None and not rank.by_script]
        due += [moment for moment in (self.kill_at, self._terminate_at, self._cause_until) if moment is not None]
        answers = (self._answer_until, self._save_until)
        due += [moment for moment in answers if moment is not None and moment > time.monotonic()]
        if self._killed_at is not None:
            due = [self._killed_at + KILLED_EXIT_S]
        # An overdue exit is polled at this interval.
        return max(min(due) - time.monotonic(), 0.05) if due else None
