"""Findings that were over with an attempt: its processes and hosts were given up, so nothing was mended. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gputrain_tui.state.finding_text import HOST_KINDS
from trainer.contract.outcome import AWAITS_HOSTS, REQUEUED, RESTARTED
from trainer.contract.record import Finding
from trainer.contract.record.unrecorded import RECORD_INCOMPLETE

MAX_EVENTS = 2000
"""Memory bound: raised and cleared events of the findings that a state keeps."""


OF_ATTEMPT = (AWAITS_HOSTS, "host_silent", "desync", "non_finite_validation", "no_process_group")
"""Kinds of findings that end with the attempt, and are cleared by its supervisor or its ranks alone."""


def is_left_standing(finding: Finding) -> bool:
    """Whether a finding would stand for ever after the end of its attempt, as nobody is left to clear it."""
    return finding.kind in OF_ATTEMPT and not finding.diagnosed


class EndedAttempts:
    """The attempt with which each finding was over that was cleared because its attempt had ended."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        """When each attempt before the newest one ended, Unix seconds, and its name."""
        self._over: dict[tuple[str, int | None, float], str] = {}
        """Name of the attempt by kind, rank and time of a finding's raised and cleared events."""

    def follow(self, event: Finding, past: Sequence[Finding], *, step_time: float) -> None:
        """Note an event about a finding, after the ``past`` ones; ``step_time``: of the newest step, Unix seconds."""
        if event.kind in (RESTARTED, REQUEUED):
            name = f"attempt {event.evidence.get('attempt', 0):.0f}" if event.kind == RESTARTED else "its job"
            self._ends.append((event.time, name))
        if event.state == "raised" or not self._ends:
            return
        key = event.kind, event.rank
        raised = next((each for each in reversed(past) if (each.kind, each.rank) == key), None)
        if raised is not None and raised.state == "raised" and self._is_over(raised, step_time):
            for each in (raised, event):
                self._over[each.kind, each.rank, each.time] = self._ends[-1][1]
            while len(self._over) > MAX_EVENTS:
                del self._over[next(iter(self._over))]

    def _is_over(self, raised: Finding, step_time: float) -> bool:
        """Whether a finding that is cleared now was over with the attempt before.

        Comparisons of ranks start over with an attempt, but the state of a host may last until steps show that it has
        changed. Gaps of the record have nothing to do with attempts.
        """
        ended_at, _ = self._ends[-1]
        lasted = raised.kind in HOST_KINDS and step_time > ended_at
        return raised.time <= ended_at and raised.kind != RECORD_INCOMPLETE and not lasted

    def over_with(self, finding: Finding) -> str:
        """Return the attempt with which a finding was over, by its raised or cleared event; empty where it was not."""
        return self._over.get((finding.kind, finding.rank, finding.time), "")

    def failed_in(self, time: float) -> str:
        """Return the attempt that ended with a failure of a time, Unix seconds; empty for the newest attempt."""
        return next((name for ended_at, name in self._ends if time <= ended_at), "")
