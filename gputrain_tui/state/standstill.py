"""The time since the last step, by the clock of whoever follows the run: those of the nodes may differ."""

from __future__ import annotations

from typing import NamedTuple

from gputrain_tui.state.run import RunState
from gputrain_tui.tables import duration

MIN_STANDSTILL_S = 2.0
"""Above what a record on another host takes to arrive."""
NOTED_STEPS, MISSED_STEPS = 3, 10
"""Missed steps, of the usual duration, from which the time is shown, and from which rates count as past."""
ACTIVITIES = {"validating": "validating for", "saving": "saving for"}
"""By the state of a rank, what a run does that makes no step."""


class Standstill(NamedTuple):
    """A run that has made no step for several steps' time."""

    seconds: float
    """Since the last step."""
    is_long: bool
    """Whether rates and the time left say nothing about now."""
    activity: str = ""
    """What the ranks do instead of a step, such as ``validating for``; empty where they ought to make one."""

    @property
    def text(self) -> str:
        """The time in words."""
        return f"{self.activity or 'no step for'} {duration(self.seconds)}"


class StepWatch:
    """Notes when steps arrive."""

    def __init__(self) -> None:
        self._step_time = 0.0
        """Time of the newest step, by the clock of its rank."""
        self._arrived_at = 0.0
        """When it was read."""

    def note(self, state: RunState, now: float, *, live: bool = True) -> None:
        """Note what was read until ``now``; of a record of the past (not ``live``) its own times count."""
        if state.step_time != self._step_time:
            self._step_time = state.step_time
            self._arrived_at = now if live else min(now, state.step_time)

    def standstill(self, state: RunState, now: float) -> Standstill | None:
        """Return how long no step has come; None while they come, before the first and after the end."""
        if state.ended is not None or not self._step_time:
            return None
        seconds = now - self._arrived_at
        if seconds < MIN_STANDSTILL_S:
            return None
        step_s = (state.figures.step_ms or 0.0) / 1e3
        if seconds < NOTED_STEPS * step_s:
            return None
        states = {view.state for view in state.ranks.values()}
        if states <= {"finished"}:
            return None
        activity = next((text for name, text in ACTIVITIES.items() if name in states), "")
        return Standstill(seconds, seconds >= MISSED_STEPS * step_s, activity)
