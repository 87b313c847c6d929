"""The pace of a run by the wall clock, pauses included, from which the time left is estimated."""

from __future__ import annotations

from collections import deque

MAX_MARKS = 60
"""Maximum number of marks, at least a second apart: the pace is that of about the last minute."""


class Pace:
    """Step rate of about the last minute."""

    def __init__(self) -> None:
        self.marks: deque[tuple[float, int]] = deque(maxlen=MAX_MARKS)
        """Unix seconds, and optimizer steps done by then."""

    def note(self, time: float, step: int) -> None:
        marks = self.marks
        if marks and time < marks[-1][0]:
            marks.clear()  # the clock was set back
        if not marks or time - marks[-1][0] >= 1.0:
            marks.append((time, step))

    def reset(self) -> None:
        self.marks.clear()

    @property
    def updates_per_s(self) -> float | None:
        if len(self.marks) < 2:
            return None
        (time_0, step_0), (time_1, step_1) = self.marks[0], self.marks[-1]
        return (step_1 - step_0) / (time_1 - time_0) if time_1 > time_0 and step_1 > step_0 else None
