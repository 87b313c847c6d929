"""Positions of a run's steps in time, samples and tokens, and their learning rates. Pure, and of bounded memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

from gputrain_tui.state.elapsed import time_by_boot
from trainer.contract.record import Step

AxisName = Literal["step", "time", "samples", "tokens"]
AXES: tuple[AxisName, ...] = ("step", "time", "samples", "tokens")
MAX_POINTS = 8192
"""Points kept; at twice as many every second one is left out, and a chart has hundreds of columns."""


class StepAxis:
    """Positions of steps on other axes, interpolated between two events: seconds by rank 0's, totals by all ranks'."""

    def __init__(self) -> None:
        self.began = 0.0
        """Begin of the first step, Unix seconds."""
        self._clock = _Points("time", "stepping", "lr")
        """Seconds since the first step began and those of stepping, at the end of each step; and its learning rate."""
        self._totals = _Points("samples", "tokens")

    def apply(self, event: Step) -> None:
        """Place the steps of an event of rank 0 in time."""
        if event.rank != 0:
            return
        clock = self._clock
        first, lr = event.step - event.steps, float("nan") if event.lr is None else event.lr
        time, stepping_s = time_by_boot(event), (event.step_ms or 0.0) / 1000 * event.steps
        if clock and first < clock.last_step:
            clock.rewind(first)
        if not clock:
            self.began = time - stepping_s
            clock.append(first, 0.0, 0.0, lr)
        seconds, stepping = clock.last("time"), clock.last("stepping")
        clock.append(event.step, max(time - self.began, seconds), stepping + stepping_s, lr)

    def count(self, first: int, last: int, samples: float, tokens: float) -> None:
        """Add what all ranks have read in some steps, which follow those before."""
        totals = self._totals
        if totals and first <= totals.last_step:
            totals.rewind(first - 1)
        if not totals:
            totals.append(first - 1, 0.0, 0.0)
        totals.append(last, totals.last("samples") + samples, totals.last("tokens") + tokens)

    @property
    def first_step(self) -> int:
        """First step, of a resumed run the first since then; 0 without any."""
        return self._clock.first_step + 1 if self._clock else 0

    def __len__(self) -> int:
        return len(self._clock)

    def has(self, name: AxisName) -> bool:
        if name == "step":
            return True
        points = self._clock if name == "time" else self._totals
        return bool(points) and points.last(name) > 0

    def at(self, name: AxisName | Literal["stepping"], step: float) -> float:
        """Return the position of a step's end: the step itself, seconds, or samples or tokens of all ranks.

        Of the seconds ``stepping`` has only those of rank 0's steps, without pauses.
        """
        if name == "step":
            return step
        return (self._totals if name == "samples" or name == "tokens" else self._clock).at(name, step)

    def lr_at(self, step: float) -> float:
        """Return the learning rate of a step; NaN where it is not known."""
        return self._clock.next_of("lr", step)


class _Points:
    """Values at steps, of which every second one is left out whenever they are too many."""

    def __init__(self, *names: str) -> None:
        self._steps = array("q")
        self._values: dict[str, array[float]] = {name: array("d") for name in names}
        self._every = 1
        """Appended points for each that is kept."""
        self._skipped = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def first_step(self) -> int:
        return self._steps[0]

    @property
    def last_step(self) -> int:
        return self._steps[-1]

    def last(self, name: str) -> float:
        return self._values[name][-1]

    def append(self, step: int, *values: float) -> None:
        if self._skipped:  # replace the newest point until the next one is due
            self._steps.pop()
            for each in self._values.values():
                each.pop()
        self._steps.append(step)
        for each, value in zip(self._values.values(), values, strict=True):
            each.append(value)
        self._skipped = (self._skipped + 1) % self._every if len(self._steps) > 1 else 0
        if len(self._steps) >= 2 * MAX_POINTS:
            self._every *= 2
            self._keep(slice(None, None, 2))

    def rewind(self, step: int) -> None:
        """Forget the points after a step, except for the first one of all."""
        self._keep(slice(max(bisect_right(self._steps, step), 1)))

    def _keep(self, points: slice) -> None:
        self._steps = self._steps[points]
        self._values = {name: values[points] for name, values in self._values.items()}
        self._skipped = 0

    def at(self, name: str, step: float) -> float:
        return value_at(self._steps, self._values[name], step)

    def next_of(self, name: str, step: float) -> float:
        """Return the value of the first point that is not before a step; NaN without any."""
        values = self._values[name]
        return values[min(bisect_left(self._steps, step), len(values) - 1)] if values else float("nan")


def value_at(steps: Sequence[int], values: Sequence[float], step: float) -> float:
    """Return the value at a step, interpolated linearly between ``steps``, which ascend; 0 without any."""
    after = bisect_right(steps, step)
    if after == 0:
        return values[0] if values else 0.0
    if after == len(steps):
        return values[-1]
    low, high = steps[after - 1], steps[after]
    return values[after - 1] + (step - low) / (high - low) * (values[after] - values[after - 1])
