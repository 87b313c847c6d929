"""Evaluation of a checkpoint without training: ``--eval-only``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trainer import distributed
from trainer.checkpoint import open_checkpoint
from trainer.contract.errors import RequestError, TrainingError
from trainer.contract.option_rules import require_consistent
from trainer.contract.options import Training
from trainer.contract.outcome import EVALUATED_CHECKPOINT
from trainer.data.seeds import seed_all
from trainer.engine import reports
from trainer.engine.batching import evaluation_batches
from trainer.engine.data_sample import require_same_data, samples_to_compare
from trainer.engine.evaluation import evaluate
from trainer.engine.model import autocast
from trainer.engine.resuming import require_weights
from trainer.engine.stopping import Best, TrainingOutcome
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task


def evaluate_checkpoint(task: Task, options: Training, ctx: WorkerContext) -> TrainingOutcome:
    """Evaluate one split with a checkpoint's weights, which rank 0 reads and sends; write nothing but the record.

    Raises:
        RequestError: the task lacks the split, or the checkpoint is damaged or of another task or model.
        TrainingError: the loss is not finite.
    """
    assert options.eval_only is not None
    require_consistent(options, task.options)
    split, path = options.eval_split, Path(options.eval_only)
    seed_all(options.seed)  # as in training, so that a random split is the same one
    splits = task.datasets()
    if split not in splits:
        known = ", ".join(name for name in splits if name != "train") or "none besides train"
        raise RequestError(f"--eval-split is {split}, but the task has no such split; it has {known}")
    batches = evaluation_batches(task, {split: splits[split]}, options, ctx)[split]
    seed_all(options.seed)
    model = task.model()
    samples = samples_to_compare({split: splits[split]}, task.collate, world_size=ctx.world_size)
    ctx.before_wait()
    require_same_data(samples, ctx.request)

    def read() -> tuple[str, dict[str, Any], int, int, list[str]]:
        source, state, passed_over = open_checkpoint(path, asked="--eval-only")
        checkpoint = require_weights(state, model, task=options.task, source=str(source))
        return str(source), checkpoint.weights, checkpoint.updates, checkpoint.epoch, passed_over

    source, weights, updates, epoch, passed_over = distributed.from_master(read)
    reports.remark(ctx, "checkpoint_passed_over", "; ".join(passed_over), severity="warning")
    reports.remark(ctx, EVALUATED_CHECKPOINT, f"evaluating {split} with the weights of step {updates}: {source}")
    try:
        model.load_state_dict(weights)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # a module of the user's own
        raise RequestError(f"{source} does not fit this model: {' '.join(str(error).split())[:300]}") from None
    ctx.set_state("validating")
    result = evaluate(
        task,
        model.to(ctx.device),
        batches,
        device=ctx.device,
        autocast=autocast(options, ctx.device),
        stop_requested=ctx.stop_requested,
        before_wait=ctx.before_wait,
    )
    if result is not None:
        if not math.isfinite(result.loss):
            raise TrainingError(f"the loss of {split} is {result.loss} with the weights of step {updates}, {source}")
        reports.report_validation(ctx, split, result, step=updates, epoch=epoch, weights_step=updates)
    return TrainingOutcome(
        updates=updates, epoch=epoch, reason="evaluated", best=Best.of(options), stopped=result is None
    )
