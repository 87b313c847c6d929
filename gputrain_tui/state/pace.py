"""The pace of a run by the wall clock, pauses included, from which the time left is estimated."""

from __future__ import annotations

from collections import deque

MAX_POINTS = 60
"""Maximum number of points, at least a second apart: the pace is that of about the last minute."""


class Pace:
    """Step rate of about the last minute."""

    def __init__(self) -> None:
        self.points: deque[tuple[float, int]] = deque(maxlen=MAX_POINTS)
        """Unix seconds, and optimizer steps done by then."""

    def note(self, time: float, step: int) -> None:
        points = self.points
        if points and time < points[-1][0]:
            points.clear()  # the clock was set back
        if not points or time - points[-1][0] >= 1.0:
            points.append((time, step))

    def reset(self) -> None:
        self.points.clear()

    @property
    def updates_per_s(self) -> float | None:
        if len(self.points) < 2:
            return None
        (time_0, step_0), (time_1, step_1) = self.points[0], self.points[-1]
        return (step_1 - step_0) / (time_1 - time_0) if time_1 > time_0 and step_1 > step_0 else None
