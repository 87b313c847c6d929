"""Duration of a run and times of its steps, by a clock that nobody sets; its pace, by the wall clock with pauses."""

from __future__ import annotations

from collections import deque

from trainer.contract.record import Step

MAX_POINTS = 60
"""Maximum number of points, at least a second apart: the pace is that of about the last minute."""


class Pace:
    """Step rate of about the last minute, from which the time left is estimated."""

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


def elapsed_s(*, started: float, until: float, measured_s: float | None) -> float:
    """Return how long a run has taken from its start to now or its end, waits in a queue included, seconds.

    ``measured_s`` is the same time by a monotonic clock; None where it was not measured.
    """
    return max(0.0, until - started if measured_s is None else measured_s)


def time_by_boot(event: Step) -> float:
    """Return the time of a step by a clock that nobody sets, Unix seconds; as recorded where the clock was not set."""
    return event.time - (event.clock_set_ms or 0.0) / 1e3
