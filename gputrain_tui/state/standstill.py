"""The time since the last step, by the clock of the process that follows the run: the nodes' clocks may differ.

Steps are only known as far as the record of each node is whole: a full disk loses steps and machine samples alike.
"""

from __future__ import annotations

from typing import NamedTuple

from gputrain_tui.state.run_state import RunState
from gputrain_tui.tables import duration
from trainer.contract.record.unrecorded import RECORD_INCOMPLETE

MIN_RECORD_BYTES = 16 << 10
"""Space on the disk of a record below which events may be missing."""
RECORD_LAG_S = 5.0
"""Age of a node's newest sample, which it takes once a second, from which its record may have stopped."""


class RecordWatch:
    """Arrival of the nodes' machine samples that show space for their records, by the clock of the reader.

    Where only the samples of one node end, and nothing tells of a gap in its record, its node agent does not run: a
    paused container, a frozen cgroup or a stopped process group holds all that runs there.
    """

    def __init__(self) -> None:
        self._recorded_at: dict[int, float] = {}
        """By node, the arrival of its newest such sample; 0 for none. Nodes whose samples lack the space are absent."""
        self._samples: dict[int, object] = {}
        self._incomplete: set[int | None] = set()
        """Nodes whose newest sample shows no space, or of which a rank has told of a gap."""

    def note(self, state: RunState, now: float) -> None:
        for node in [node for node in self._recorded_at if node not in state.nodes]:  # it is gone
            del self._recorded_at[node]
        for node, sample in state.nodes.items():
            if sample is self._samples.get(node):
                continue
            self._samples[node] = sample
            if sample.record_free_bytes is not None:
                is_free = sample.record_free_bytes >= MIN_RECORD_BYTES
                self._recorded_at[node] = now if is_free else self._recorded_at.get(node, 0.0)
        self._incomplete = {
            node
            for node, sample in state.nodes.items()
            if sample.record_free_bytes is not None and sample.record_free_bytes < MIN_RECORD_BYTES
        }
        self._incomplete |= {
            state.ranks[rank].node for kind, rank in state.findings if kind == RECORD_INCOMPLETE and rank in state.ranks
        }

    def whole_until(self, node: int | None, now: float) -> float:
        """Return the time up to which the record of a node is known to be whole; now if nothing speaks against it."""
        recorded_at = now if node is None else self._recorded_at.get(node, now)
        return now if now - recorded_at < RECORD_LAG_S or self.is_held(node, now) else recorded_at

    def is_held(self, node: int | None, now: float) -> bool:
        """Whether all processes of a node are held: its samples have ended, and those of others go on."""
        late = {each for each, at in self._recorded_at.items() if now - at >= RECORD_LAG_S}
        return node in late and node not in self._incomplete and len(late) < len(self._recorded_at)

    def is_whole(self, now: float) -> bool:
        return all(self.whole_until(node, now) == now for node in self._recorded_at)


MIN_STANDSTILL_S = 2.0
"""Longer than the record of another host takes to arrive."""
SHOWN_STEPS, LONG_STEPS = 3, 10
"""Missed steps of the usual duration from which the time is shown, and from which rates are out of date."""
ACTIVITIES = {
    "validating": "validating for", "saving": "saving for", "compile": "compiling for", "threads": "script ended for",
}  # fmt: skip
"""Activity of a run without steps, by the stage of a rank."""

UNRECORDED = "nothing recorded for"
"""Text of a run whose record may have stopped, so that steps are not known."""
STARTS_AGAIN = "starting again for"
"""Text of an attempt after the first one, before its first step."""


class Standstill(NamedTuple):
    """A run without a step for the time of several steps."""

    seconds: float
    is_long: bool
    """Whether rates and the time left are out of date."""
    activity: str = ""
    """Activity of the ranks instead of steps, such as ``validating for``; empty where a step is due."""

    @property
    def text(self) -> str:
        return f"{self.activity or 'no step for'} {duration(self.seconds)}"


class StepWatch:
    """Arrival time of the newest step."""

    def __init__(self) -> None:
        self._newest = (0.0, 0)
        """Time of the newest step, by the clock of its rank, and the slowest rank's step: a clock may be set back."""
        self._arrived_at = 0.0
        self._began_at = 0.0
        """Arrival of an attempt after the first one that has no step yet; 0 while there is none."""
        self._record = RecordWatch()

    def note(self, state: RunState, now: float, *, live: bool = True) -> None:
        """Record a new step as arrived ``now``, or at its own time in the record of an earlier time (not ``live``)."""
        self._record.note(state, now)
        newest = state.step_time, state.step
        if newest != self._newest:
            self._newest = newest
            self._arrived_at = now if live else min(now, state.step_time)
        if state.step_time > state.attempt_began:
            self._began_at = 0.0
        elif not self._began_at:
            self._began_at = now if live else min(now, state.attempt_began)

    def standstill(self, state: RunState, now: float) -> Standstill | None:
        """Return the standstill; None while steps arrive, before the first step and after the end."""
        if state.ended is not None or not state.step_time:
            return None
        if self._began_at:
            return Standstill(now - self._began_at, True, STARTS_AGAIN)
        seconds = now - self._arrived_at
        if seconds < MIN_STANDSTILL_S:
            return None
        step_s = (state.figures.step_ms or 0.0) / 1e3
        if seconds < SHOWN_STEPS * step_s:
            return None
        states = {view.state for view in state.ranks.values()}
        if states <= {"finished"} or all(view.awaits_first_step for view in state.ranks.values()):
            return None
        stages = states | {view.phase for view in state.ranks.values()}
        activity = next((text for name, text in ACTIVITIES.items() if name in stages), "")
        if not self._record.is_whole(now):
            activity = UNRECORDED
        return Standstill(seconds, seconds >= LONG_STEPS * step_s, activity)
