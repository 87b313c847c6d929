"""Validations of a training, its best weights, and its test."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from trainer.contract.options import Training
from trainer.engine import reports
from trainer.engine.best_weights import BestWeights
from trainer.engine.ema import WeightAverage
from trainer.engine.evaluation import Evaluation, evaluate
from trainer.engine.preparation import TrainingData
from trainer.engine.stopping import Best
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task


class Validator:
    """Validation and test of the averaged weights, if there is an average; every rank calls each method.

    ``model`` is the task's own module, and ``metrics`` are the names of the task's, None if not known yet.

    Raises:
        RequestError: the best validation is to be chosen by a metric that the task does not have.
    """

    def __init__(
        self,
        task: Task,
        options: Training,
        ctx: WorkerContext,
        data: TrainingData,
        model: nn.Module,
        average: WeightAverage,
        autocast: AbstractContextManager[Any],
        *,
        metrics: Iterable[str] | None,
    ) -> None:
        self.enabled = "valid" in data.splits and bool(options.valid_every_epochs or options.valid_every_updates)
        self.best = Best.of(options, metrics=metrics if self.enabled else None)
        self._tests = options.test and "test" in data.splits
        self._tests_best = self._tests and options.test_best
        self.best_weights = BestWeights(wanted=self._tests_best and ctx.rank == 0)
        self.model_has_best = False
        """Whether the model holds the best weights in place of the last ones, after the test."""
        self._task, self._ctx, self._data, self._model = task, ctx, data, model
        self._average, self._autocast = average, autocast
        self._findings = reports.ValidationFindings(ctx)

    def validate(self, *, step: int, epoch: int) -> bool | None:
        """Validate; return whether the result is the best so far, or None on all ranks if one was asked to stop."""
        with self._average.in_place():
            result = self._evaluate("valid")
            if result is None:
                return None
            is_best = self.best.add(result.loss, result.metrics, step=step)
            if is_best:
                self.best_weights.keep(self._model)
        reports.report_validation(self._ctx, "valid", result, step=step, epoch=epoch)
        self._findings.add("valid", result, step=step)
        return is_best

    def test(self, *, step: int, epoch: int) -> str | None:
        """Report a sample of the model's output, then test the last weights, or the best ones if the options say so.

        Returns:
            The results that are not finite, in words; None on all ranks if one was asked to stop.
        """
        with self._average.in_place():
            if self._ctx.rank == 0 and (text := self._task.sample(self._model)):
                reports.report_sample(self._ctx, text, step=step)
        if not self._tests:
            return ""
        best = self.best
        if self._tests_best and best.value is not None and best.step != step:
            self.model_has_best = self.best_weights.load_into(self._model, best, self._ctx, last_step=step)
        with nullcontext() if self.model_has_best else self._average.in_place():
            result = self._evaluate("test")
        if result is None:
            return None
        weights_step = best.step if self.model_has_best else step
        reports.report_validation(self._ctx, "test", result, step=step, epoch=epoch, weights_step=weights_step)
        return result.non_finite

    def _evaluate(self, split: str) -> Evaluation | None:
        return evaluate(
            self._task,
            self._model,
            self._data.evaluation[split],
            device=self._ctx.device,
            autocast=self._autocast,
            stop_requested=self._ctx.stop_requested,
            before_wait=self._ctx.before_wait,
        )
