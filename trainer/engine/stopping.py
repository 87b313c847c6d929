"""When training ends, how it ended, and which validation was the best; equal on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.errors import RequestError, nearest
from trainer.contract.options import Training


def end_reached(options: Training, *, epoch: int, updates: int, lr: float) -> str:
    """Return why training ends before the next update of ``epoch`` (from 1), or an empty string."""
    if options.max_updates and updates >= options.max_updates:
        return f"max_updates {options.max_updates} reached"
    if options.max_epochs and epoch > options.max_epochs:
        return f"max_epochs {options.max_epochs} reached"
    if lr <= options.min_lr:
        return f"the learning rate is not above min_lr {options.min_lr:g}"
    return ""


class StepTimes:
    """Reports how long a step takes of late, by which a stop request is waited for.

    The longer of the last two counts: the next one may be as long, and a first one that compiles is forgotten.
    """

    LEAST_S = 0.3
    """Shorter steps are all alike: three of them are within any grace."""
    CHANGE = 1.25
    """Factor by which it must have changed to be reported again."""

    def __init__(self, report: Callable[[float], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now = now
        self._began = now()
        self._last_s = 0.0
        self._reported_s = self.LEAST_S

    def step_done(self) -> None:
        """Take the time since the last call as a step's, with all that came between."""
        now = self._now()
        took_s, self._began = now - self._began, now
        longer_s = max(self.LEAST_S, took_s, self._last_s)
        self._last_s = took_s
        if not 1 / self.CHANGE <= longer_s / self._reported_s <= self.CHANGE:
            self._reported_s = longer_s
            self._report(longer_s)


@dataclass(kw_only=True)
class Best:
    """The best validation so far and how many have passed without a better one."""

    metric: str
    maximize: bool
    value: float | None = None
    step: int = 0
    since: int = 0
    """Validations since the best."""

    @classmethod
    def of(cls, options: Training) -> Best:
        """What the options call best: less loss, or more of a metric."""
        maximize = options.maximize_best_metric
        return cls(metric=options.best_metric, maximize=options.best_metric != "loss" if maximize is None else maximize)

    def see(self, loss: float, metrics: dict[str, float], *, step: int) -> bool:
        """Take note of a validation; True when it is the best so far, which one that is not finite never is.

        Raises:
            RequestError: the task has no such metric.
        """
        known = {"loss": loss, **metrics}
        if self.metric not in known:
            raise RequestError(
                f"best_metric {self.metric!r} is not a metric of this task, which has {', '.join(known)}"
                f"{nearest(self.metric, known)}"
            )
        value = known[self.metric]
        better = math.isfinite(value) and (
            self.value is None or (value > self.value if self.maximize else value < self.value)
        )
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "since": self.since}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint; another metric starts anew."""
        if state.get("metric") != self.metric:
            return
        value, step, since = state["value"], state["step"], state["since"]
        assert isinstance(step, int)
        assert isinstance(since, int)
        kept = math.nan if value is None else float(str(value))
        self.value = kept if math.isfinite(kept) else None
        self.step, self.since = step, since


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """How a training ended."""

    updates: int
    epoch: int
    reason: str
    best: Best
    stopped: bool = False
    """Whether somebody ended it before it had reached an end of its own."""
    saved: Path | None = None
    """The checkpoint of the update at which it was stopped; rank 0 only."""
    not_kept: str = ""
    """What could not be saved of a training that was stopped, in one line; rank 0 only."""
