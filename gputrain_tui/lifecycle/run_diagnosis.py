"""Diagnosis of a run by its supervisor: a defect of it is recorded, and must not end the run or keep it from ending."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gputrain_tui.lifecycle.stack_request import TIMEOUT_S, request_stacks
from gputrain_tui.plan.planner import distributed_timeout
from trainer.contract.record import Failure, Finding, RunDir

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
    from gputrain_tui.plan.planner import Plan
    from gputrain_tui.state import RunState

T = TypeVar("T")

FIRST_DIAGNOSIS_S = 1.0
"""Time of the first diagnosis after the start; until then it would slow down the start of the ranks."""


class RunDiagnosis:
    """Findings and state of a run from its record, as long as the record can be read."""

    def __init__(self, run_dir: RunDir, *, now: Callable[[], float]) -> None:
        """Read nothing yet.

        Args:
            run_dir: the record.
            now: clock, Unix seconds.
        """
        self._dir = run_dir
        self._now = now
        self._watch: LiveDiagnosis | None = None
        self._stack_request = ""
        """The newest request for stacks that a stall has caused."""
        self._stacks_due = 0.0
        """Time until which its answers are waited for, monotonic seconds."""
        self.due = time.monotonic() + FIRST_DIAGNOSIS_S
        """Time of the next check, monotonic seconds; infinite after a defect."""

    @property
    def step_s(self) -> float:
        """Duration of the last step on the slowest rank, seconds; 0 before the first step."""
        return 0.0 if self._watch is None else self._watch.step_s

    @property
    def state(self) -> RunState | None:
        """State of the run after the events read so far; None before the first check."""
        return None if self._watch is None else self._watch.state

    def check(self) -> list[Finding]:
        """Read the new events; return new findings, or one that the run is no longer diagnosed."""
        try:
            watch = self._open()
            findings = watch.check()
            self.due = time.monotonic() + watch.due_in_s()
        except Exception as error:  # noqa: BLE001 - the run goes on without its diagnosis
            traceback.print_exc()
            self.due = math.inf
            message = f"this run is no longer diagnosed: {type(error).__name__}: {error}"
            return [Finding(time=self._now(), kind="not_diagnosed", severity="info", message=message)]
        if any(finding.kind == "stalled" and finding.state == "raised" for finding in findings):
            self._stacks_due = time.monotonic() + TIMEOUT_S
            with suppress(OSError):  # on a full disk a hang is named without its line
                self._stack_request = request_stacks(self._dir)
        return findings

    def hang(self, plan: Plan) -> Failure | None:
        """Return the failure of a rank that hangs for good, if ``cluster.on_stall`` ends the attempt then."""
        if self.state is None or not any(kind == "stalled" for kind, _ in self.state.findings):
            return None
        answers = [answer for answer in self.state.stacks.values() if answer.request == self._stack_request]
        if len(answers) < len(self.state.ranks) and time.monotonic() < self._stacks_due:
            return None
        from gputrain_tui.lifecycle import restart  # imported only after a stall

        options = restart.cluster_options(self._dir)
        if (action := restart.on_stall(options)) == "report":
            return None
        limit_s = max(distributed_timeout(node.argv) for node in plan.nodes)
        failure = self._guarded(lambda: self._open().hang(timeout_s=options.stall_timeout, limit_s=limit_s))
        if failure is None:
            return None
        saved = self.state.checkpoints[-1] if self.state.checkpoints else None
        kept = (
            "no checkpoint was saved before" if saved is None else f"the newest checkpoint is that of step {saved.step}"
        )
        ended = f'cluster.on_stall = "{action}" ended it; {kept}'
        return msgspec.structs.replace(failure, message=f"{failure.message}; {ended}")

    def state_at_end(self) -> RunState | None:
        """Return the run's state after its whole record; None if it cannot be read."""
        return self._guarded(lambda: self._open().state_at_end())

    def last_findings(self) -> list[Finding]:
        """Return what the last steps show: a short run is over before its first check."""
        return self._guarded(lambda: self._open().last_findings()) or []

    def missing_rank(self) -> Failure | None:
        """Return the failure of the rank that the others have lost; None if the record does not show which one."""
        from gputrain_tui.diagnosis.missing import lost_peer

        return self._guarded(lambda: lost_peer(self._open().state_at_end()))

    def _open(self) -> LiveDiagnosis:
        if self._watch is None:
            # Imported after the launch of the nodes, which it would delay.
            from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis

            self._watch = LiveDiagnosis(self._dir, now=self._now)
        return self._watch

    def _guarded(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception:  # noqa: BLE001 - the run goes on without its diagnosis
            traceback.print_exc()
            return None
