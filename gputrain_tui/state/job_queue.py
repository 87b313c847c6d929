"""Jobs of a run that a scheduler starts: how many have begun, and the one that waits. Pure."""

from __future__ import annotations

import time

from trainer.contract.outcome import REQUEUED
from trainer.contract.record import Finding, Queued


class JobQueue:
    """The jobs of a run, by its own events; a run without a scheduler has one."""

    def __init__(self) -> None:
        self.jobs = 0
        """Jobs that have begun: each has one supervisor."""
        self.newest: Queued | None = None
        """Newest report about the job that waits, until it begins; None between its submission and the first one."""
        self.is_waiting = False
        """Whether the run waits for its first or next job."""
        self.is_before_ranks = False
        """Whether it waits, or its job has begun and no rank of it is spawned yet.

        By the order of the events, as the clocks of the nodes may differ, but for a report that is read too late.
        """
        self._newest_at = 0.0
        """Newest time of a report that the run waits, and of the start of a rank, Unix seconds."""

    def wait(self, event: Queued | Finding) -> None:
        """Note that the run waits for its first or next job; a finding only if it is of that kind."""
        if event.time < self._newest_at or (isinstance(event, Finding) and event.kind != REQUEUED):
            return
        self._newest_at = event.time
        self.newest = event if isinstance(event, Queued) else None
        self.is_waiting = self.is_before_ranks = True

    def begin(self) -> None:
        """Note that a job has begun."""
        self.jobs += 1
        self.newest, self.is_waiting = None, False

    def spawn(self, moment: float) -> None:
        """Note that a rank of a job was spawned at a moment, Unix seconds."""
        self._newest_at = max(moment, self._newest_at)
        self.newest, self.is_waiting, self.is_before_ranks = None, False, False


def queued_text(event: Queued) -> str:
    """Return job, partition, reason and expected start of a run that waits, such as ``as job 7 in main: Priority``."""
    parts = [f" in {event.partition}" if event.partition else "", f": {event.reason}" if event.reason else ""]
    if event.expected_start is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(event.expected_start))
        parts.append(f", expected to start at {at}")
    return f"as job {event.job}{''.join(parts)}"


def jobs_text(jobs: int) -> str:
    """Return the number of jobs as the end of a phrase, such as `` in 2 jobs``; empty for one."""
    return f" in {jobs} jobs" if jobs > 1 else ""
