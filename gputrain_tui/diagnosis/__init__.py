"""What is wrong with a run, and why: from its state to findings with cause, evidence and advice.

Looking says how much there is of what. ``Diagnosis`` remembers what it has said, so that a finding is raised once and
cleared only when little of it is left, and what it has seen, so that a look costs no more than what is new. No I/O and
no clock.
"""

from __future__ import annotations

from itertools import takewhile

from gputrain_tui.diagnosis.bounds import bounds
from gputrain_tui.diagnosis.health import MemoryGrowth, desync, losses
from gputrain_tui.diagnosis.stall import Heard, stalls
from gputrain_tui.diagnosis.straggler import WINDOW, stragglers
from gputrain_tui.diagnosis.symptom import CLEARED, Symptom, who
from gputrain_tui.diagnosis.timeline import HISTORY, Timeline
from gputrain_tui.state import RunState
from trainer.contract.record import Finding

__all__ = ["HISTORY", "KINDS", "Diagnosis"]

KINDS = frozenset(
    ("straggler", "input_bound", "communication_bound", "memory_creep", "non_finite", "loss_spike", "stalled")
)
"""What is found here; other findings are the ranks' own and only passed on."""

Key = tuple[str, int | None]


class Diagnosis:
    """What was found in a run so far."""

    def __init__(self) -> None:
        self._raised: dict[Key, tuple[Finding, float]] = {}
        """What stands, and the value below which it is cleared."""
        self._timeline = Timeline()
        self._memory = MemoryGrowth()
        self._heard = Heard()
        self._adopted = False

    def look(self, state: RunState, now: float) -> list[Finding]:
        """Return what has been found, or is over, since the last look.

        Args:
            state: a run state that keeps ``HISTORY`` step events.
            now: Unix seconds.
        """
        if not self._adopted:
            self._adopt(state)
        self._heard.listen(state, now)
        seen: dict[Key, Symptom] = {}
        for symptom in self._symptoms(state, now):
            key = (symptom.kind, symptom.rank)
            if key not in seen or seen[key].value < symptom.value:
                seen[key] = symptom
        events = self._clear(seen, state, now)
        for key, symptom in seen.items():
            if symptom.confirmed and symptom.value >= symptom.threshold and self._is_news(key, symptom):
                finding = _finding(symptom, state, now)
                self._raised[key] = finding, CLEARED * symptom.threshold
                if finding.kind == "straggler":
                    for row in self._timeline.last(WINDOW):
                        row.troubled = True
                events.append(finding)
        return events

    def _symptoms(self, state: RunState, now: float) -> list[Symptom]:
        """Return all that can be seen now."""
        timeline = self._timeline
        before = timeline.rows[-1] if timeline.rows else None
        timeline.follow(state)
        if any(kind == "straggler" for kind, _ in self._raised):
            for row in takewhile(lambda row: row is not before, reversed(timeline.rows)):
                row.troubled = True
        return [
            *stragglers(state, timeline),
            *bounds(state, timeline),
            *losses(state, timeline),
            *self._memory.creeping(state),
            *([] if self._ranks_told_desync(state) else desync(state)),
            *stalls(state, self._heard, now),
        ]

    def _ranks_told_desync(self, state: RunState) -> bool:
        """Tell whether somebody else has found that models differ, and said more than can be seen from here."""
        return any(key[0] == "desync" and key not in self._raised for key in state.findings)

    def _adopt(self, state: RunState) -> None:
        """Go on with what another process has raised in this run and not cleared."""
        self._adopted = True
        for key, finding in state.findings.items():
            if finding.kind in KINDS:
                self._raised[key] = finding, 0.0

    def _is_news(self, key: Key, symptom: Symptom) -> bool:
        """Tell whether this was not said yet, or said without a cause that is known now."""
        if key not in self._raised:
            return True
        cause = self._raised[key][0].cause
        return cause == "unattributed" and symptom.cause != cause

    def _clear(self, seen: dict[Key, Symptom], state: RunState, now: float) -> list[Finding]:
        events = []
        failed = any(view.state == "failed" for view in state.ranks.values())
        for key, (finding, below) in list(self._raised.items()):
            if finding.kind == "stalled" and failed:
                continue  # that others give up waiting does not make the rank go on
            symptom = seen.get(key)
            if symptom is not None and symptom.value >= (below or CLEARED * symptom.threshold):
                continue
            del self._raised[key]
            events.append(
                Finding(
                    time=now,
                    kind=finding.kind,
                    state="cleared",
                    severity=finding.severity,
                    rank=finding.rank,
                    host=finding.host,
                    device=finding.device,
                    step=state.step,
                    cause=finding.cause,
                    message=finding.message,
                )
            )
        return events


def _finding(symptom: Symptom, state: RunState, now: float) -> Finding:
    host, device = who(state, symptom.rank) if symptom.rank is not None else (None, None)
    return Finding(
        time=now,
        kind=symptom.kind,
        severity=symptom.severity,
        rank=symptom.rank,
        host=host,
        device=device,
        step=symptom.step,
        cause=symptom.cause,
        message=symptom.message,
        evidence={name: round(value, 4) for name, value in symptom.evidence.items()},
        advice=symptom.advice,
    )
