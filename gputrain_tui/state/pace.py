"""The pace of a run by the wall clock, pauses included, from which the time left is estimated."""

from __future__ import annotations

from collections import deque

MARKS = 60
"""Marks of (time, step), at least a second apart."""


class Pace:
    """Marks of about the last minute."""

    def __init__(self) -> None:
        self.marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        """Unix seconds and optimizer steps that were done then."""

    def note(self, time: float, step: int) -> None:
        """Note that a step was done."""
        marks = self.marks
        if not marks or time - marks[-1][0] >= 1.0:
            marks.append((time, step))

    def begin_anew(self) -> None:
        """Forget what was before a restart."""
        self.marks.clear()

    @property
    def updates_per_s(self) -> float | None:
        """Optimizer steps per second of wall time; None before two marks."""
        if len(self.marks) < 2:
            return None
        (time_0, step_0), (time_1, step_1) = self.marks[0], self.marks[-1]
        return (step_1 - step_0) / (time_1 - time_0) if time_1 > time_0 and step_1 > step_0 else None
