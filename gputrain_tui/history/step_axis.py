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
    """Positions of steps on other axes: those of rank 0's events, interpolated between two events."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._positions: dict[str, array[float]] = {name: array("d") for name in ("time", "samples", "tokens")}
        """Seconds since the first step began, samples of rank 0, tokens of rank 0; at the end of each step."""
        self._lr = array("d")
        self._began = 0.0
        """Unix seconds."""
        self._every = 1
        """Events between two points."""
        self._skipped = 0
        self._all = {"samples": 0, "tokens": 0}
        self._own = {"samples": 0, "tokens": 0}

    def apply(self, event: Step) -> None:
        self._all["samples"] += event.samples
        if event.tokens is not None:
            self._all["tokens"] += event.tokens
        if event.rank != 0:
            return
        if self._steps and event.step - event.steps < self._steps[-1]:
            self._rewind(event.step - event.steps)
        time = time_by_boot(event)
        if not self._steps:
            self._began = time - (event.step_ms or 0.0) / 1000 * event.steps
            self._append(event.step - event.steps, 0.0, event.lr)
        self._own["samples"] += event.samples
        self._own["tokens"] += event.tokens or 0
        if self._skipped:  # replace the newest point until the next one is due
            self._steps.pop()
            for values in (self._lr, *self._positions.values()):
                values.pop()
        self._append(event.step, time - self._began, event.lr)
        self._skipped = (self._skipped + 1) % self._every

    def __len__(self) -> int:
        return len(self._steps)

    def _append(self, step: int, seconds: float, lr: float | None) -> None:
        self._steps.append(step)
        before = self._positions["time"]
        before.append(max(seconds, before[-1] if before else 0.0))
        self._positions["samples"].append(self._own["samples"])
        self._positions["tokens"].append(self._own["tokens"])
        self._lr.append(float("nan") if lr is None else lr)
        if len(self._steps) >= 2 * MAX_POINTS:
            self._every *= 2
            self._steps = self._steps[::2]
            self._positions = {name: values[::2] for name, values in self._positions.items()}
            self._lr = self._lr[::2]
            self._skipped = 0

    def _rewind(self, step: int) -> None:
        kept = max(bisect_right(self._steps, step), 1)
        self._steps = self._steps[:kept]
        self._positions = {name: values[:kept] for name, values in self._positions.items()}
        self._lr = self._lr[:kept]
        self._skipped = 0

    def has(self, name: AxisName) -> bool:
        return name == "step" or (bool(self._steps) and self._positions[name][-1] > 0)

    def at(self, name: AxisName, step: float) -> float:
        """Return the position of a step's end: the step itself, seconds, or samples or tokens of all ranks."""
        if name == "step":
            return step
        position = value_at(self._steps, self._positions[name], step)
        if name == "time" or not self._own[name]:
            return position
        return position * self._all[name] / self._own[name]

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
