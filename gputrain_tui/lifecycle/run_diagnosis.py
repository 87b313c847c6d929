"""Diagnosis of a run by its supervisor: a defect of it is recorded, and must not end the run or keep it from ending."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from trainer.contract.record import Failure, Finding, RunDir

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
    from gputrain_tui.state import RunState

T = TypeVar("T")

FIRST_DIAGNOSIS_S = 1.0
"""Time of the first diagnosis after the start; until then it would slow down the start of the ranks."""


class RunDiagnosis:
    """Findings and state of a run from its record, as long as the record can be read."""

    def __init__(self, run_dir: RunDir, *, now: Callable[[], float]) -> None:
        self._dir = run_dir
        self._now = now
        self._watch: LiveDiagnosis | None = None
        self.due = time.monotonic() + FIRST_DIAGNOSIS_S
        """Time of the next check, monotonic seconds; infinite after a defect."""

    @property
    def step_s(self) -> float:
        return 0.0 if self._watch is None else self._watch.step_s

    @property
    def state(self) -> RunState | None:
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
        return findings

    def state_at_end(self) -> RunState | None:
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
