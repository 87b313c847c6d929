"""Diagnoses a running run from its record, with a bounded share of one core."""

from __future__ import annotations

import time
from collections.abc import Callable

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.state import RunState
from trainer.contract.record import Finding, RunDir

INTERVAL_S = 0.1
"""Minimum time between two checks: the interval at which ranks write."""
DUTY = 0.03
"""Maximum share of a core for the checks; the more ranks, the longer the pauses between checks."""
RISES, FALLS = 1 / 8, 1 / 2
"""Weights of a check in the moving average of the cost, if it cost more and if it cost less than the average.

On a busy machine one check in a hundred is charged 20 times its usual cost; a pause in proportion to that would miss
short events.
"""


class LiveDiagnosis:
    """Diagnosis of a run from its growing record."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.process_time,
    ) -> None:
        self._reader = RunReader(run_dir, now=now)
        self._state = RunState(history=HISTORY)
        self._diagnosis = Diagnosis()
        self._now = now
        self._clock = clock
        self._cost = cost
        self._due = clock() + INTERVAL_S
        self._usual_s: float | None = None
        """Average CPU time of a check; None before the first."""

    def due_in_s(self) -> float:
        return max(0.0, self._due - self._clock())

    def check(self) -> list[Finding]:
        """Read the new events and return new findings; none before the next check is due."""
        if self.due_in_s() > 0.0:
            return []
        began = self._cost()
        self._state.apply_all(self._reader.poll())
        behind = self._reader.backlog_bytes > 0
        found = [] if behind else self._diagnosis.update(self._state, self._now())
        pause_s = 0.0 if behind else INTERVAL_S
        spent_s = self._cost() - began
        usual_s = spent_s if self._usual_s is None else self._usual_s
        self._usual_s = usual_s + (RISES if spent_s > usual_s else FALLS) * (spent_s - usual_s)
        self._due = self._clock() + max(pause_s, self._usual_s / DUTY)
        return found

    @property
    def step_s(self) -> float:
        """Duration of the last step on the slowest rank, seconds; 0 before the first step."""
        last = [view.last for view in self._state.ranks.values() if view.last is not None]
        return max((event.step_ms / 1e3 for event in last if event.step_ms is not None), default=0.0)

    @property
    def state(self) -> RunState:
        return self._state

    def state_at_end(self) -> RunState:
        """Read the rest of the record and return the final state; for a record that no longer grows."""
        while events := self._reader.poll():
            self._state.apply_all(events)
        return self._state

    def last_findings(self) -> list[Finding]:
        """Diagnose the whole record of a run that has finished: it may have been over before a check was due."""
        self.state_at_end()
        return [found for found in self._diagnosis.update(self._state, self._now()) if found.kind != "stalled"]

    def close(self) -> None:
        self._reader.close()
