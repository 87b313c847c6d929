"""Evaluation of a checkpoint without training: ``--eval-only``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer import distributed
from trainer.checkpoint import weights_of
from trainer.contract.errors import RequestError, TrainingError
from trainer.contract.option_rules import evaluated_split, require_consistent
from trainer.contract.options import Training
from trainer.contract.outcome import EVALUATED_CHECKPOINT
from trainer.data.seeds import seed_all
from trainer.engine import reports
from trainer.engine.data_sample import DataSample
from trainer.engine.ddp_model import Strategy, autocast
from trainer.engine.end_conditions import Best, TrainingOutcome
from trainer.engine.evaluation import evaluate
from trainer.engine.preparation import evaluation_batches, read_splits, require_same_on_ranks, strategy_of
from trainer.engine.resuming import DataDigests, require_weights
from trainer.engine.starting_point import StartingPoint
from trainer.engine.task_state import state_of
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task


def evaluate_checkpoint(task: Task, options: Training, ctx: WorkerContext, start: StartingPoint) -> TrainingOutcome:
    """Evaluate one split with a checkpoint's weights, which rank 0 has read; write nothing but the record."""
    assert options.eval_only is not None
    require_consistent(options, task.options)
    distributed.from_master(lambda: start.checkpoint() and None)
    splits = read_splits(task, options, ctx)
    split = evaluated_split(options, splits)
    if split not in splits:
        known = ", ".join(name for name in splits if name != "train") or "none besides train"
        raise RequestError(f"--eval-split is {split}, but the task has no such split; it has {known}")
    batches = evaluation_batches(task, {split: splits[split]}, options, ctx)[split]
    seed_all(options.seed)
    strategy: Strategy | None = None
    model = task.model()
    if options.strategy == "fsdp" and ctx.world_size > 1:
        strategy = strategy_of(task, model, options, ctx)
    own_state = state_of(task)
    sample = DataSample(splits[split], task.collate, num_workers=options.num_workers)
    require_same_on_ranks(task, {split: sample}, ctx)
    source = start.source

    def read() -> dict[str, Any]:
        opened = start.checkpoint()
        entries = require_weights(opened.state, model, task=options.task, task_state=own_state, source=source)
        notes = [("checkpoint_passed_over", "; ".join(opened.passed_over))]
        notes.append(("data_changed", _data_change(entries.data.splits, split, sample, source)))
        return {
            "model": weights_of(opened.state, source=source),
            "rest": (entries.updates, entries.position.epoch, notes),
        }

    sent = distributed.from_master(read) if strategy is None else strategy.spread(read)
    weights, (updates, epoch, notes) = sent["model"], sent["rest"]
    for kind, text in notes:
        reports.finding(ctx, kind, text, severity="warning")
    reports.finding(ctx, EVALUATED_CHECKPOINT, f"evaluating {split} with the weights of step {updates}: {source}")
    try:
        model.load_state_dict(weights)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # a module of the user's own
        raise RequestError(f"{source} does not fit this model: {' '.join(str(error).split())[:300]}") from None
    ctx.set_state("validating")
    sharded = strategy is not None
    if not sharded:
        model = model.to(ctx.device)
    result = evaluate(task, model, batches, ctx, autocast(options, ctx.device), sharded=sharded)
    if result is not None:
        reports.report_validation(ctx, split, result, step=updates, epoch=epoch, weights_step=updates)
        if result.non_finite:
            raise TrainingError(
                f"{split} is not finite with the weights of step {updates}, {source}: {result.non_finite}"
            )
    return TrainingOutcome(
        updates=updates, epoch=epoch, reason="evaluated", best=Best.of(options), stopped=result is None
    )


def _data_change(known: Mapping[str, DataDigests], split: str, sample: DataSample, source: str) -> str:
    """Describe how a split differs from that of the checkpoint's training; empty if it does not, or is not known."""
    if not known:
        return ""
    if split not in known:
        return f"the training of {source} had no {split} split: there is none to compare this one with"
    changed = sample.altered(known[split].samples, known[split].known)
    return f"the {split} split differs from that of the training of {source}: {changed}" if changed else ""
