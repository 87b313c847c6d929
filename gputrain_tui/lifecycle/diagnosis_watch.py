"""Diagnoses a running run from its record, with a bounded share of one core."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.state import RunState
from trainer.contract.record import Failure, Finding, RunDir

if TYPE_CHECKING:
    from gputrain_tui.history.run_reader import RunReader

INTERVAL_S = 0.1
"""Minimum time between two checks: the interval at which ranks write."""
FIRST_DIAGNOSIS_S = 1.0
"""Time of the first diagnosis after the start; until then it would slow down the start of the ranks."""
DUTY = 0.03
"""Maximum share of a core for the checks; the more ranks, the longer the pauses between checks."""
RISES, FALLS = 1 / 8, 1 / 2
"""Weights of a check in the moving average of the cost, if it cost more and if it cost less than the average.

On a busy machine one check in a hundred is charged 20 times its usual cost; a pause in proportion to that would miss
short events.
"""

T = TypeVar("T")


class LiveDiagnosis:
    """Findings and state of a run from its growing record."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.process_time,
    ) -> None:
        self.state = RunState(history=HISTORY)
        """After the events read so far."""
        self.due = clock() + INTERVAL_S
        """Time of the next check, by ``clock``."""
        self._dir = run_dir
        self._diagnosis = Diagnosis()
        self._now = now
        self._clock = clock
        self._cost = cost
        self._usual_s: float | None = None
        """Average CPU time of a check; None before the first."""

    @cached_property
    def _reader(self) -> RunReader:
        from gputrain_tui.history.run_reader import RunReader  # imported after the launch of the nodes: it delays it

        return RunReader(self._dir, now=self._now)

    def due_in_s(self) -> float:
        return max(0.0, self.due - self._clock())

    def check(self) -> list[Finding]:
        """Read the new events and return new findings; none before the next check is due."""
        if self.due_in_s() > 0.0:
            return []
        began = self._cost()
        self.state.apply_all(self._reader.poll())
        behind = self._reader.backlog_bytes > 0
        findings = [] if behind else self._diagnosis.update(self.state, self._now())
        pause_s = 0.0 if behind else INTERVAL_S
        spent_s = self._cost() - began
        usual_s = spent_s if self._usual_s is None else self._usual_s
        self._usual_s = usual_s + (RISES if spent_s > usual_s else FALLS) * (spent_s - usual_s)
        self.due = self._clock() + max(pause_s, self._usual_s / DUTY)
        return findings

    @property
    def step_s(self) -> float:
        """Duration of the last step on the slowest rank, seconds; 0 before the first step."""
        last = [view.last for view in self.state.ranks.values() if view.last is not None]
        return max((event.step_ms / 1e3 for event in last if event.step_ms is not None), default=0.0)

    def read_rest(self) -> RunState:
        """Read the rest of the record and return the final state; for a record that no longer grows."""
        while events := self._reader.poll():
            self.state.apply_all(events)
        return self.state

    def close(self) -> None:
        self._reader.close()


class RunDiagnosis(LiveDiagnosis):
    """Diagnosis by a supervisor: a defect of it is recorded, and neither ends the run nor keeps it from ending."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(run_dir)
        self.due = time.monotonic() + FIRST_DIAGNOSIS_S

    def check(self) -> list[Finding]:
        """Read the new events; return new findings, or one that the run is no longer diagnosed."""
        try:
            return super().check()
        except Exception as error:  # noqa: BLE001 - the run goes on without its diagnosis
            traceback.print_exc()
            self.due = math.inf
            message = f"this run is no longer diagnosed: {type(error).__name__}: {error}"
            return [Finding(time=self._now(), kind="not_diagnosed", severity="info", message=message)]

    def state_at_end(self) -> RunState | None:
        """Return the run's state after its whole record; None if it cannot be read."""
        return _guarded(self.read_rest)

    def last_findings(self) -> list[Finding]:
        """Return what the whole record of a finished run shows: it may have been over before a check was due."""
        findings = _guarded(lambda: self._diagnosis.update(self.read_rest(), self._now())) or []
        return [finding for finding in findings if finding.kind != "stalled"]

    def missing_rank(self) -> Failure | None:
        """Return the failure of the rank that the others have lost; None if the record does not show which one."""
        from gputrain_tui.diagnosis.missing import lost_peer

        return _guarded(lambda: lost_peer(self.read_rest()))


def _guarded(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except Exception:  # noqa: BLE001 - the run goes on without its diagnosis
        traceback.print_exc()
        return None
