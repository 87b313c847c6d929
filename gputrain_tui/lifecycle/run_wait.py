"""Waits for the end of runs by their records, whoever has started them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gputrain_tui.history.lost_run import lost_text
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import ENDED, RunStateName, as_recorded, state_of
from gputrain_tui.lifecycle import launchers
from gputrain_tui.lifecycle.leftovers import supervisors_of
from gputrain_tui.lifecycle.polling import MAX_QUERY_INTERVAL_S, MIN_QUERY_INTERVAL_S
from trainer.contract.errors import ExitCode

UNCLEAR = ("lost", None)
"""States of a run for which nobody may record an end."""
Outlook = Literal["awaited", "ended", "abandoned"]
"""``abandoned``: it has no end, and nothing that would record one."""
ABANDONED_S = 3.0
"""Time after which a run without a living supervisor is abandoned: a successor or the command in the foreground may be
starting another one."""


def outlook(
    state: RunStateName | None, *, has_supervisor: bool, has_job: bool, is_archived: bool, for_s: float
) -> Outlook:
    """Return whether the end of a run is still to come.

    Args:
        state: of the run; None if its status cannot be read, as of a deleted one.
        has_supervisor: whether a process lives that is, or becomes, its supervisor.
        has_job: whether a scheduler has a job for it that is not over.
        is_archived: whether it is an archive's copy, which never changes.
        for_s: time since its state became ``lost`` or unreadable, seconds.
    """
    if state in ENDED:
        return "ended"
    if is_archived:
        return "abandoned"
    if state not in UNCLEAR or has_supervisor or has_job or for_s < ABANDONED_S:
        return "awaited"
    return "abandoned"


@dataclass(frozen=True, kw_only=True)
class WaitResult:
    """How the wait for one run ended."""

    run: Run
    """With its last status."""
    state: str
    """``finished``, ``failed`` or ``stopped``; ``lost``, ``deleted`` or ``unreadable`` if no end is to come."""
    problem: str = ""
    """Why no end is to come; empty if the run has ended."""

    @property
    def exit_code(self) -> int:
        """Exit code of the run; 1 if it is not known."""
        status = self.run.status
        return ExitCode.FAILED if self.problem or status.exit_code is None else status.exit_code


class RunWait:
    """The wait for the end of one run, which is only read, except that the end of a scheduler's job is recorded."""

    def __init__(self, run: Run) -> None:
        self.run = run
        """With the status of the last check."""
        self._unclear_since = math.inf
        """When its state became lost or unreadable, monotonic seconds."""
        self._query_at = -math.inf
        self._interval_s = MIN_QUERY_INTERVAL_S
        self._has_job = False
        """Whether a scheduler had a job of the lost run when it was queried last."""

    def check(self, now: float) -> WaitResult | None:
        """Read the run's state; return the result once the wait is over. ``now``: monotonic seconds."""
        state = self._state()
        is_newly_unclear = state in UNCLEAR and math.isinf(self._unclear_since)
        if state not in ENDED and (is_newly_unclear or now >= self._query_at):
            self.run = launchers.refresh(self.run)
            self._has_job = state in UNCLEAR and launchers.has_job(self.run)
            self._query_at, self._interval_s = now + self._interval_s, min(2 * self._interval_s, MAX_QUERY_INTERVAL_S)
            state = self._state()
        self._unclear_since = min(self._unclear_since, now) if state in UNCLEAR else math.inf
        will = outlook(
            state,
            has_supervisor=state in UNCLEAR and bool(supervisors_of(self.run.dir.path)),
            has_job=self._has_job,
            is_archived=self.run.status.archived is not None,
            for_s=now - self._unclear_since,
        )
        if will == "awaited":
            return None
        return _result(self.run, state)

    def _state(self) -> RunStateName | None:
        """Return the state by the newest status, which is kept in ``run``; None if there is none that can be read."""
        now = open_run(self.run.dir.path)
        if now is None and self.run.status.by_hand and self.run.dir.path.is_dir():
            status = as_recorded(self.run.dir, self.run.status)
            now = Run(dir=self.run.dir, status=status, state=state_of(status))
        if now is not None:
            self.run = now
        return None if now is None else now.state


def _result(run: Run, state: RunStateName | None) -> WaitResult:
    """Return the result for a run that has ended or is abandoned."""
    if state is None:
        is_deleted = not run.dir.path.is_dir()
        problem = "its run directory was deleted" if is_deleted else f"{run.dir.status} cannot be read"
        return WaitResult(run=run, state="deleted" if is_deleted else "unreadable", problem=problem)
    problem = lost_text(run.dir, run.status) if state == "lost" else ""
    if state == "lost" and run.status.archived is not None:
        problem = "it had not ended when its archive was made"
    return WaitResult(run=run, state=state, problem=problem)
