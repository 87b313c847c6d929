"""State of a training: its entries in a checkpoint, resuming from one, and starting with other weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint import copy_to_cpu, fit, open_weights
from trainer.contract.errors import CheckpointError, RequestError
from trainer.contract.options import Training
from trainer.contract.outcome import SEED_ON_RESUME, SETTINGS_ON_RESUME
from trainer.engine import reports
from trainer.engine.checkpointing import Saving
from trainer.engine.ema import WeightAverage
from trainer.engine.item_count import ItemCount
from trainer.engine.optimizers import LossScaler, Schedule, require_state_of, restore
from trainer.engine.preparation import TrainingData
from trainer.engine.resuming import (
    CheckpointEntries,
    DataDigests,
    changed_settings,
    misfit,
    one_line,
    parameter_difference,
    parameter_names,
    read_entries,
    require_task,
    resume_rng,
    seed_effect,
)
from trainer.engine.share_balance import ShareBalance
from trainer.engine.starting_point import StartingPoint
from trainer.engine.task_state import TASK_STATE, difference, state_of, without_task_state
from trainer.engine.validation import Validator
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.registry import is_same_task
from trainer.tasks.task import Task


@dataclass(kw_only=True)
class TrainingState:
    """Counters of one rank's training, and its components that have a state."""

    options: Training
    ctx: WorkerContext
    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    average: WeightAverage
    scaler: LossScaler
    items: ItemCount
    task: Task
    data: TrainingData
    validation: Validator
    saving: Saving
    balance: ShareBalance
    updates: int = 0
    """Optimizer steps done."""
    reports_unrepeatable: bool = False
    """Whether it was reported that the data draws random numbers of its own."""
    validated_at: int = -1
    """Optimizer steps done at the last validation; -1 before the first."""
    _unsaved_stream: bool = False
    """Whether it was reported that a checkpoint cannot hold the state of the stream."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, except random states; call this while the weight average is in place."""
        sample = self.data.samples["train"]
        train = sample.state_dict()
        if sample.unrepeatable is not None and not self.reports_unrepeatable:
            self.reports_unrepeatable = True
            reports.finding(
                self.ctx,
                "not_resumed",
                f"sample {sample.unrepeatable} of the training data differs when it is read again with the same seed: "
                "a resumed training draws other random numbers for it, since no checkpoint keeps them",
                severity="info" if self.ctx.resumed_from is None else "warning",
                advice="in the dataset, draw from the global generator of torch, Python or numpy, which is seeded and "
                "resumed, in place of one of its own",
            )
        return {
            "task": self.options.task,
            "updates": self.updates,
            "count_estimate": float(self.items.estimate),
            "model": self.model.state_dict(),
            **({"plain": self.average.plain_weights()} if self.average.enabled else {}),
            "parameters": parameter_names(self.model, self.optimizer),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "position": self._position(),
            **({"shares": shares} if (shares := self.balance.state_dict()) else {}),
            "best": self.validation.best.state_dict(),
            "validated_at": self.validated_at,
            "data": {
                **train,
                "splits": {split: each.state_dict() for split, each in self.data.samples.items() if split != "train"},
            },
            TASK_STATE: state_of(self.task),
        }

    def _position(self) -> dict[str, Any]:
        """Return the position in the training data, without a stream's own state if a checkpoint cannot hold it."""
        position = self.data.train.state_dict()
        try:
            copy_to_cpu(position.get("stream_state"))
        except CheckpointError as error:
            del position["stream_state"]
            if not self._unsaved_stream:
                how = "a resumed training reads the samples already seen again and skips them"
                reports.finding(self.ctx, "stream_state", f"state_dict() of the training data: {error}; {how}")
            self._unsaved_stream = True
        return position

    def require_fit(self, state: Mapping[str, Any], *, source: str) -> CheckpointEntries:
        """Return a checkpoint's entries; raise if this training could not continue exactly from it. Changes nothing."""
        entries = read_entries(state, source=source)
        require_task(entries, self.options.task, state_of(self.task), source=source)
        wrong = misfit("model", entries.model, self.model.state_dict())
        if not (wrong or self.options.reset_optimizer):
            wrong = parameter_difference(entries.parameters, parameter_names(self.model, self.optimizer))
        if not wrong and entries.plain is not None:
            trained = {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}
            wrong = misfit("plain", entries.plain, trained)
        if not (wrong or self.options.reset_optimizer):
            try:
                require_state_of(self.optimizer, entries.optimizer)
            except RequestError as error:
                wrong = f"entry optimizer: {error}; --reset-optimizer goes on without it"
        if wrong:
            raise RequestError(f"{source} does not fit this model: {one_line(wrong)}")
        if self.options.reset_dataloader:
            return entries
        try:
            self.data.train.require_fit(state["position"])
        except RequestError as error:
            raise RequestError(f"{source}: entry position: {error}") from None
        return entries

    def fitting_weights(self, file: str, *, partial: bool) -> tuple[dict[str, Tensor], str]:
        """Return the weights of a file that fit this model, and a description of the others; change nothing."""
        own = self.model.state_dict()
        weights = open_weights(file, model=own)
        fitting, misfits = fit(weights.tensors, own)
        if misfits and not (partial and fitting):
            hint = "; --finetune-partial loads those that match" if fitting else ""
            raise RequestError(f"{file} does not fit this model, {misfits}{hint}")
        return weights.load(fitting), misfits

    def difference_from(self, start: StartingPoint) -> str:
        """Describe how the task's state differs from that of the weights to start with; empty if it does not."""
        own = state_of(self.task)
        if start.task and not is_same_task(start.task, self.options.task):
            return f"their task {start.task} has another state, which was not used" if start.task_state else ""
        if start.task_state is None:
            return without_task_state(start.source) if own else ""
        wrong = difference(start.task_state, own)
        if wrong and not self.options.finetune_partial:
            raise RequestError(
                f"{start.source} does not fit this run's data: in the task's state {wrong}, where the weights were "
                "trained; --finetune-partial loads the weights that match all the same"
            )
        return f"in the task's state {wrong}, where they were trained" if wrong else ""

    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights of another training into the model; everything else begins fresh."""
        self.model.load_state_dict(weights, strict=False)
        self.average.begin()

    def load_state_dict(self, state: Mapping[str, Any], *, source: str, own_checkpoint: bool = False) -> None:
        """Restore a checkpoint: exactly on the same world size; on another one, each sample is read once per epoch."""
        ctx, options = self.ctx, self.options
        entries = self.require_fit(state, source=source)
        fresh_state, fresh_data, fresh_best = (
            not own_checkpoint and reset
            for reset in (options.reset_optimizer, options.reset_dataloader, options.reset_meters)
        )
        altered = self._altered(entries.data) if ctx.rank == 0 and not fresh_data else []
        entry = "model"
        try:
            self.model.load_state_dict(entries.model)
            if not fresh_state:
                entry = "optimizer"
                restore(self.optimizer, entries.optimizer)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # of a class of the user's own
            raise RequestError(f"{source} does not fit this model: entry {entry}: {one_line(str(error))}") from None
        self.average.load(entries.plain, self.model)
        if self.average.enabled != (entries.plain is not None):
            begins, ends = "starts from these weights", "ends; training continues from the plain weights"
            change = begins if self.average.enabled else ends
            reports.finding(ctx, "ema_on_resume", f"the average of the weights {change}")
        self.scaler.load_state_dict(entries.scaler)
        if not fresh_data:
            self.data.train.load_state_dict(state["position"])
        self.balance.load_state_dict(entries.shares)
        self.schedule.load_state_dict(state["schedule"], self.data.train, same_data=not fresh_data)
        if not fresh_best:
            self.validation.best.load_state_dict(state["best"])
        self.updates = self.saving.last_update = entries.updates
        self.validated_at = entries.validated_at
        self.items.estimate = entries.count_estimate
        if ctx.rank == 0 and not fresh_best:
            best = self.validation.best
            if best_file := self.validation.best_weights.find_beside(source, best):
                self.saving.inherit_best(best_file, step=best.step)
        resume_rng(entries, rank=ctx.rank, world_size=ctx.world_size, source=source)
        position = self.data.train.position
        fresh = "; the state of the optimizer was reset" if fresh_state else ""
        where = f"sample {position.consumed} of epoch {position.epoch}"
        ctx.print_line(f"resumed at {where}, after {self.updates} steps{fresh}")
        same_ranks = len(entries.rng) == ctx.world_size
        effect = seed_effect(state["position"], seed=options.seed, shuffle=options.shuffle, same_ranks=same_ranks)
        reports.finding(ctx, SEED_ON_RESUME, "" if fresh_data else effect)
        reports.finding(ctx, SETTINGS_ON_RESUME, changed_settings(entries.recipe, ctx.recipe))
        reports.finding(ctx, "inexact_resume", inexact_resume(options, ctx.world_size))
        for what, how in altered:
            reports.finding(
                ctx,
                "data_changed",
                f"{what} differs from that of {source}: {how}",
                severity="warning",
                advice="to continue that training exactly, stop and restore its data",
            )

    def _altered(self, data: DataDigests) -> list[tuple[str, str]]:
        """Return the splits whose data differs from that of a checkpoint, each with how it does."""
        altered = []
        for split, saved in {"train": data, **data.splits}.items():
            if (sample := self.data.samples.get(split)) and (how := sample.altered(saved.samples, saved.known)):
                altered.append(("the training data" if split == "train" else f"the {split} split", how))
        return altered


def inexact_resume(options: Training, world_size: int) -> str:
    """Describe why the next steps differ from those of an uninterrupted training; empty if they do not."""
    if world_size > 1 and options.ddp_comm_hook == "powersgd":
        return (
            "the next steps differ from those of an uninterrupted training: --ddp-comm-hook powersgd begins anew, "
            "because the errors of its compression are in no checkpoint"
        )
    if world_size > 2 and options.static_graph:
        return (
            "the next steps may differ in the last bits from those of an uninterrupted training: with --static-graph "
            "DDP arranges its buckets after the first step of each process"
        )
    return ""
