"""Validations of a training, its best weights, and its test."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import distributed
from trainer.checkpoint import BEST, CheckpointError, copy_to_cpu, load, peek, step_name, weights_of
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.options import Training
from trainer.contract.outcome import BEST_NOT_TESTED
from trainer.contract.record import Finding
from trainer.contract.record.checkpoints import checkpoints_in
from trainer.data.seeds import keep_random_state, seed_all
from trainer.engine import reports
from trainer.engine.ddp_model import Strategy, values_of
from trainer.engine.ema import WeightAverage
from trainer.engine.end_conditions import Best
from trainer.engine.evaluation import Evaluation, evaluate
from trainer.engine.preparation import TrainingData
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task


class Validator:
    """Validation and test of the averaged weights, if there is an average; every rank calls each method.

    ``metrics`` are the names of the task's, None if not known yet.

    Raises:
        RequestError: the best validation is to be chosen by a metric that the task does not have.
    """

    def __init__(
        self,
        task: Task,
        options: Training,
        ctx: WorkerContext,
        data: TrainingData,
        strategy: Strategy,
        average: WeightAverage,
        autocast: AbstractContextManager[Any],
        *,
        metrics: Iterable[str] | None,
    ) -> None:
        self.enabled = "valid" in data.splits and bool(options.valid_every_epochs or options.valid_every_updates)
        self.best = Best.of(options, lower=task.lower_is_better, metrics=metrics if self.enabled else None)
        self._tests = options.test and "test" in data.splits
        self._tests_best = self._tests and options.test_best
        self.best_weights = BestWeights(strategy, wanted=self._tests_best)
        self.model_has_best = False
        """Whether the model holds the best weights in place of the last ones, after the test."""
        self._task, self._ctx, self._data = task, ctx, data
        self._model, self._sharded = strategy.module, strategy.sharded
        self._average, self._autocast = average, autocast
        self._non_finite: Finding | None = None

    def validate(self, *, step: int, epoch: int) -> bool | None:
        """Validate; return whether the result is the best so far, or None on all ranks if one was asked to stop."""
        with self._average.in_place():
            result = self._evaluate("valid")
            if result is None:
                return None
            is_best = self.best.add(result.loss, result.metrics, step=step)
            if is_best:
                self.best_weights.keep()
        reports.report_validation(self._ctx, "valid", result, step=step, epoch=epoch)
        self._non_finite = reports.non_finite_validation(self._ctx, self._non_finite, result, step=step)
        return is_best

    def test(self, *, step: int, epoch: int) -> str | None:
        """Report a sample of the model's output, then test the last weights, or the best ones if the options say so.

        Return the results that are not finite, in words; None on all ranks if one was asked to stop.
        """
        with self._average.in_place():
            self._report_sample(step)
        if not self._tests:
            return ""
        best = self.best
        if self._tests_best and best.value is not None and best.step != step:
            self.model_has_best = self.best_weights.load(best, self._ctx, last_step=step)
        with nullcontext() if self.model_has_best else self._average.in_place():
            result = self._evaluate("test")
        if result is None:
            return None
        weights_step = best.step if self.model_has_best else step
        reports.report_validation(self._ctx, "test", result, step=step, epoch=epoch, weights_step=weights_step)
        return result.non_finite

    def _evaluate(self, split: str) -> Evaluation | None:
        batches = self._data.evaluation[split]
        return evaluate(self._task, self._model, batches, self._ctx, self._autocast, sharded=self._sharded)

    def _report_sample(self, step: int) -> None:
        if self._ctx.rank == 0 and not self._sharded:
            text = self._task.sample(self._model)
        elif self._sharded:
            # All ranks compute it together, with the same random numbers, so that they make the same passes.
            with keep_random_state():
                seed_all(step)
                text = self._task.sample(self._model)
        else:
            return
        if self._ctx.rank == 0 and text:
            reports.report_sample(self._ctx, str(text), step=step)


class BestWeights:
    """Best weights of a training, in rank 0's memory; after a resume in a checkpoint, until there are better ones.

    Of a sharded model each rank keeps its own part.

    In memory, because there may be no file: checkpoints may be switched off, or the disk full. The copy has the weights
    alone; a checkpoint that is being written takes several times as much memory.
    """

    def __init__(self, strategy: Strategy, *, wanted: bool) -> None:
        self._strategy = strategy
        self._wanted = wanted and (distributed.is_master() or strategy.sharded)
        self._weights: dict[str, Any] | None = None
        self._file: Path | None = None
        self._missing_reason = ""

    def keep(self) -> None:
        if not self._wanted:
            return
        self._file = None
        try:
            self._weights = copy_to_cpu(self._own())
        except CheckpointError as error:
            self._weights, self._missing_reason = None, str(error)

    def _own(self) -> dict[str, Any]:
        """Return the tensors of the model that this rank has, which are the model's own."""
        return {
            name: values_of(value) if isinstance(value, Tensor) else value
            for name, value in self._strategy.module.state_dict().items()
        }

    def find_beside(self, source: str, best: Best) -> Path | None:
        """Find the best checkpoint beside the one that is resumed, or that one itself; return it, None without one."""
        self._file = None
        if best.value is None:
            return None
        path = Path(source)
        folder = path.parent
        others = sorted(folder / name for name in checkpoints_in(folder))
        for candidate in dict.fromkeys((folder / BEST, folder / step_name(best.step), path, *others)):
            if candidate.is_file() and owner_of(candidate) == owner_of(path) and _is_of(candidate, best):
                self._file = candidate
                return candidate
        self._missing_reason = f"{folder}, from which the training was resumed, has no checkpoint of that step"
        return None

    def _find(self, best: Best) -> tuple[dict[str, Any] | None, str]:
        """Return the weights of the best validation, or None and the reason in one line."""
        if self._weights is not None or self._file is None:
            return self._weights, self._missing_reason
        try:
            if not _is_of(self._file, best):
                return None, f"{self._file} is gone, or was replaced"
            return weights_of(load(self._file), source=str(self._file)), ""
        except CheckpointError as error:
            return None, str(error)

    def load(self, best: Best, ctx: WorkerContext, *, last_step: int) -> bool:
        """Load the best weights on all ranks; return whether there are any. Every rank calls this."""
        ctx.before_wait()
        strategy = self._strategy
        if strategy.sharded and self._weights is not None:
            for name, value in self._own().items():
                if isinstance(value, Tensor):
                    value.copy_(self._weights[name])
            return True

        def found() -> dict[str, Any]:
            weights, reason = self._find(best)
            return {"model": weights, "reason": reason}

        weights, reason = map(strategy.spread(found).__getitem__, ("model", "reason"))
        if weights is None:
            text = f"testing the last weights (step {last_step}), not the best (step {best.step}): {reason}"
            reports.finding(ctx, BEST_NOT_TESTED, text, severity="warning")
            return False
        strategy.module.load_state_dict(weights)
        return True


def _is_of(path: Path, best: Best) -> bool:
    """Return whether a file is the checkpoint of this best validation; another training may have left files there."""
    try:
        entries = peek(path)
    except CheckpointError:
        return False
    return entries.get("updates") == best.step and entries.get("best") == {**best.state_dict(), "since": 0}
