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
TOTALS = ("samples", "tokens", "stepping")
MAX_POINTS = 8192
"""Points kept; at twice as many every second one is left out, and a chart has hundreds of columns."""


class StepAxis:
    """Positions of steps on other axes: those of rank 0's events, interpolated between two events."""

    def __init__(self) -> None:
        self.began = 0.0
        """Begin of the first step, Unix seconds."""
        self._steps = array("q")
        self._positions: dict[str, array[float]] = {name: array("d") for name in ("time", *TOTALS)}
        """Seconds since the first step began, and totals of rank 0; at the end of each step."""
        self._lr = array("d")
        self._every = 1
        """Events between two points."""
        self._skipped = 0
        self._all = {"samples": 0, "tokens": 0}
        self._own = dict.fromkeys(TOTALS, 0.0)

    def apply(self, event: Step) -> None:
        self._all["samples"] += event.samples or 0
        if event.tokens is not None:
            self._all["tokens"] += event.tokens
        if event.rank != 0:
            return
        if self._steps and event.step - event.steps < self._steps[-1]:
            self._rewind(event.step - event.steps)
        time, stepping_s = time_by_boot(event), (event.step_ms or 0.0) / 1000 * event.steps
        if not self._steps:
            self.began = time - stepping_s
            self._append(event.step - event.steps, 0.0, event.lr)
        self._own["samples"] += event.samples or 0
        self._own["tokens"] += event.tokens or 0
        self._own["stepping"] += stepping_s
        if self._skipped:  # replace the newest point until the next one is due
            self._steps.pop()
            for values in (self._lr, *self._positions.values()):
                values.pop()
        self._append(event.step, time - self.began, event.lr)
        self._skipped = (self._skipped + 1) % self._every

    @property
    def first_step(self) -> int:
        """First step, of a resumed run the first since then; 0 without any."""
        return self._steps[0] + 1 if self._steps else 0

    def __len__(self) -> int:
        return len(self._steps)

    def _append(self, step: int, seconds: float, lr: float | None) -> None:
        self._steps.append(step)
        before = self._positions["time"]
        before.append(max(seconds, before[-1] if before else 0.0))
        for name, total in self._own.items():
            self._positions[name].append(total)
        self._lr.append(float("nan") if lr is None else lr)
        if len(self._steps) >= 2 * MAX_POINTS:
            self._every *= 2
            self._keep(slice(None, None, 2))

    def _rewind(self, step: int) -> None:
        self._keep(slice(max(bisect_right(self._steps, step), 1)))

    def _keep(self, points: slice) -> None:
        self._steps, self._lr = self._steps[points], self._lr[points]
        self._positions = {name: values[points] for name, values in self._positions.items()}
        self._skipped = 0

    def has(self, name: AxisName) -> bool:
        return name == "step" or (bool(self._steps) and self._positions[name][-1] > 0)

    def at(self, name: AxisName | Literal["stepping"], step: float) -> float:
        """Return the position of a step's end: the step itself, seconds, or samples or tokens of all ranks.

        Of the seconds ``stepping`` has only those of rank 0's steps, without pauses.
        """
        if name == "step":
            return step
        position = value_at(self._steps, self._positions[name], step)
        return position * self._all[name] / self._own[name] if name in self._all and self._own[name] else position

    def lr_at(self, step: float) -> float:
        """Return the learning rate of a step; NaN where it is not known."""
        if not self._steps:
            return float("nan")
        return self._lr[min(bisect_left(self._steps, step), len(self._lr) - 1)]


def value_at(steps: Sequence[int], values: Sequence[float], step: float) -> float:
    """Return the value at a step, interpolated linearly between ``steps``, which ascend; 0 without any."""
    after = bisect_right(steps, step)
    if after == 0:
        return values[0] if values else 0.0
    if after == len(steps):
        return values[-1]
    low, high = steps[after - 1], steps[after]
    return values[after - 1] + (step - low) / (high - low) * (values[after] - values[after - 1])
