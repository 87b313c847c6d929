"""The validations of a run, the newest ones, and the best one by the criterion of its best checkpoint. Pure."""

from __future__ import annotations

from collections import deque
from math import isfinite

import msgspec

from trainer.contract.record import TrainingPlan, Validation
from trainer.contract.record.numbers import Count, FiniteFloat


class BestValidation(msgspec.Struct, frozen=True, kw_only=True):
    """The best validation of a training: that of the checkpoint which ``export``, ``predict`` and ``eval`` take."""

    value: FiniteFloat
    """Of the metric by which the best one is chosen."""
    step: Count
    """Optimizer steps done."""
    metric: str = "loss"
    """``train.best_metric``: ``loss``, or a metric of the task."""
    maximize: bool = False
    """Whether a higher value is better."""

    def is_better_than(self, other: BestValidation | None) -> bool:
        return other is None or (self.value > other.value if self.maximize else self.value < other.value)


class RecordedValidations(deque[Validation]):
    """The newest validations and tests, and the best validation of all."""

    def __init__(self, maxlen: int) -> None:
        super().__init__(maxlen=maxlen)
        self.best: BestValidation | None = None
        """None before the first that is finite; one that is not is neither better nor worse."""
        self._metric, self._maximize = "loss", False

    def begin(self, plan: TrainingPlan) -> None:
        """Take the criterion of a start, and the best validation before it, as the resumed checkpoint has it."""
        self._metric, self._maximize = plan.best_metric, plan.best_is_highest
        self.best = None if plan.best_value is None else self._of(plan.best_value, plan.best_step)

    def add(self, event: Validation) -> None:
        """Add a validation or a test; only the former, which tests the weights as they are, can be the best."""
        self.append(event)
        if event.split != "valid" or event.weights_step is not None:
            return
        value = {**event.metrics, "loss": event.loss}.get(self._metric)
        if value is not None and isfinite(value) and (new := self._of(value, event.step)).is_better_than(self.best):
            self.best = new

    def newest(self, split: str = "valid") -> Validation | None:
        return next((each for each in reversed(self) if each.split == split), None)

    def newest_test(self) -> Validation | None:
        """Return the newest evaluation with a ``weights_step``: a test, or a run of ``eval``."""
        return next((each for each in reversed(self) if each.weights_step is not None), None)

    def _of(self, value: float, step: int) -> BestValidation:
        return BestValidation(value=value, step=step, metric=self._metric, maximize=self._maximize)
