"""End conditions and outcome of a training, and its best validation; equal on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.errors import RequestError, TrainingError, nearest
from trainer.contract.options import Training
from trainer.data.batches import EpochBatches
from trainer.data.stream_batches import StreamBatches


def end_reached(options: Training, *, epoch: int, updates: int) -> str:
    """Return why training ends before the next update of ``epoch`` (from 1), or an empty string."""
    if options.max_updates and updates >= options.max_updates:
        return f"max_updates {options.max_updates} reached"
    if options.max_epochs and epoch > options.max_epochs:
        return f"max_epochs {options.max_epochs} reached"
    return ""


def update_freq(options: Training, epoch: int) -> int:
    """Return the micro-steps of an optimizer step in an epoch, from 1."""
    return options.update_freq[min(epoch, len(options.update_freq)) - 1]


def last_update(options: Training, train: EpochBatches | StreamBatches, *, updates: int) -> int:
    """Return the optimizer steps after which ``max_epochs`` ends, with ``updates`` done; 0 if it is not known."""
    epoch, last = train.position.epoch, options.max_epochs
    if not last or not train.updates_per_epoch(1):
        return 0
    if epoch > last:
        return updates
    listed = min(last, max(epoch, len(options.update_freq)))  # the epochs after it are alike
    later = sum(train.updates_per_epoch(update_freq(options, each)) for each in range(epoch + 1, listed + 1))
    later += (last - listed) * train.updates_per_epoch(options.update_freq[-1])
    return updates + train.updates_left(update_freq(options, epoch)) + later


class StepTimes:
    """Reporter of the recent duration of a step, which sets the grace period of a stop request.

    The longer of the last two steps counts: the next one may take as long, and a first one that compiles is forgotten.
    """

    LEAST_S = 0.3
    """Shorter steps are reported as this long: three of them are within any grace period."""
    CHANGE = 1.25
    """Factor by which the duration must have changed to be reported again."""

    def __init__(self, report: Callable[[float], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now = now
        self._began = now()
        self._last_s = 0.0
        self._reported_s = self.LEAST_S

    def step_done(self) -> None:
        """Take the time since the last call as the duration of a step, with any validation or save in it."""
        now = self._now()
        took_s, self._began = now - self._began, now
        longer_s = max(self.LEAST_S, took_s, self._last_s)
        self._last_s = took_s
        if not 1 / self.CHANGE <= longer_s / self._reported_s <= self.CHANGE:
            self._reported_s = longer_s
            self._report(longer_s)


@dataclass(kw_only=True)
class Best:
    """The best validation so far, and the number of validations since."""

    metric: str
    maximize: bool
    value: float | None = None
    step: int = 0
    since: int = 0
    """Validations since the best; those without a finite value do not count."""
    unknown: int = 0
    """Newest validations in a row without a finite value."""

    @classmethod
    def of(cls, options: Training, *, lower: Sequence[str] = (), metrics: Iterable[str] | None = None) -> Best:
        """Return the criterion of the options; refuse an unknown one.

        By default a lower loss is better, also a metric with that in its name or one of ``lower``; else a higher one.
        """
        metric, maximize = options.best_metric, options.maximize_best_metric
        if maximize is None:
            maximize = "loss" not in metric.casefold() and metric not in lower
        best = cls(metric=metric, maximize=maximize)
        if metrics is not None:
            best.require_known(metrics)
        return best

    def require_known(self, metrics: Iterable[str]) -> None:
        known = ["loss", *metrics]
        if self.metric not in known:
            raise RequestError(
                f"--best-metric {self.metric}: the task has no such metric, but {', '.join(known)}"
                f"{nearest(self.metric, known)}"
            )

    def end_reason(self, options: Training) -> str:
        """Return why patience ends the training, or an empty string; raise if only it would and it cannot compare."""
        others = options.max_updates or options.max_epochs or options.stop_time or options.min_lr >= 0
        if options.patience and self.unknown >= options.patience and not others:
            raise TrainingError(
                f"the {self.metric} of the last {self.unknown} validations is NaN or infinite, and nothing but "
                "--patience, which compares it, would end this training"
            )
        ended = options.patience and self.since >= options.patience
        return f"no {'higher' if self.maximize else 'lower'} {self.metric} in {self.since} validations" if ended else ""

    def add(self, loss: float, metrics: dict[str, float], *, step: int) -> bool:
        """Add a validation; return whether it is the best. One that is not finite is neither better nor worse."""
        self.require_known(metrics)
        value = {"loss": loss, **metrics}[self.metric]
        if not math.isfinite(value):
            self.unknown += 1
            return False
        self.unknown = 0
        better = self.value is None or (value > self.value if self.maximize else value < self.value)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def state_dict(self) -> dict[str, object]:
        return {"metric": self.metric, "value": self.value, "step": self.step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entry of a checkpoint, unless it is of another metric."""
        if state["metric"] != self.metric:
            return
        value = state["value"]
        self.value = value if value is not None and math.isfinite(value) else None
        self.step, self.since = state["step"], state["since"]


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """Outcome of a training."""

    updates: int
    epoch: int
    reason: str
    best: Best
    stopped: bool = False
    saved: Path | None = None
    """The checkpoint of the step at which it was stopped; rank 0 only."""
    not_kept: str = ""
    """Line about a checkpoint that a stopped training could not write; rank 0 only."""
