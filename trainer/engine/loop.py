"""The training loop: step, accumulate, validate, save, stop.

`Loop.run` is the loop itself; `Loop._update` is one optimizer step. Batches, timing, schedule, checkpoints and
collectives have modules of their own; the entries of a checkpoint, and resuming, are in `training_state.py`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from trainer import distributed
from trainer.contract.errors import NotKeptError, RequestError, TrainingError
from trainer.contract.option_rules import ends_without_validation, require_consistent, require_end
from trainer.contract.options import Training
from trainer.contract.outcome import describe_stop
from trainer.data.batches import Update
from trainer.data.loader import mix_seed
from trainer.data.seeds import seed_all
from trainer.distributed.host_copies import host_copies
from trainer.engine import reports, task_state
from trainer.engine.accelerator import batch_copy, choose_algorithms
from trainer.engine.agreement import Agreement, LoopRequests
from trainer.engine.batching import batch_sizes, evaluation_batches, training_batches
from trainer.engine.best_weights import BestWeights
from trainer.engine.checkpointing import Saving
from trainer.engine.data_sample import data_samples, require_same_data, samples_to_compare
from trainer.engine.ema import WeightAverage
from trainer.engine.evaluation import Evaluation, evaluate
from trainer.engine.item_count import ItemCount
from trainer.engine.loss_check import check_loss, read_sample_batches
from trainer.engine.loss_scaler import LossScaler
from trainer.engine.model import (
    Accumulation,
    autocast,
    checkpoint_activations,
    clip,
    compression,
    factor_for,
    keep_buffers,
    require_trainable,
    share_buffers,
    trainable,
    unwrap,
    wrap,
)
from trainer.engine.model_flops import FlopCount
from trainer.engine.non_finite import FiniteCheck, NonFiniteError
from trainer.engine.one_sample import require_batches_for_norms
from trainer.engine.optimizers import Schedule, training_optimizer
from trainer.engine.out_of_memory import OutOfMemoryError, describe_out_of_memory, is_out_of_memory
from trainer.engine.parameter_use import ParameterUse
from trainer.engine.stopping import Best, StepTimes, TrainingOutcome, end_reached
from trainer.engine.training_state import TrainingState
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task, summed_loss
from trainer.telemetry.step_meter import StepMeter


class Loop:
    """One rank's training, from a task and options to an outcome."""

    def __init__(self, task: Task, options: Training, ctx: WorkerContext) -> None:
        """Build model, data, optimizer and schedule; every rank builds the same model.

        Raises:
            RequestError: the options do not fit the task, the data or the number of ranks.
        """
        require_consistent(options, task.options)
        require_end(options, task.options)
        self.task, self.options, self.ctx = task, options, ctx
        seed_all(options.seed)  # so that a random split is the same on all ranks
        self.splits = task.datasets()
        reports.remark(ctx, "data_read", task.data_note())
        if "train" not in self.splits:
            raise RequestError(f"the task has no training data; its splits are {', '.join(self.splits) or 'none'}")
        if "valid" not in self.splits and not ends_without_validation(options):
            raise RequestError(
                f"--patience is {options.patience}, but nothing is validated, as the task has no validation data, and "
                "nothing would end this training: set --max-epochs, --max-updates or --stop-time too"
            )
        self.train_batches = training_batches(task, self.splits["train"], options, ctx)
        self.eval_batches = evaluation_batches(task, self.splits, options, ctx)
        samples = data_samples(self.splits, task.collate, num_workers=options.num_workers)
        sample_batches = read_sample_batches(task, self.splits, num_workers=options.num_workers)
        seed_all(options.seed)  # the same initialisation on all ranks, whatever numbers reading the data drew
        model = task.model()
        require_trainable(model)
        require_batches_for_norms(task, model, self.splits["train"], options, smallest=self.train_batches.smallest)
        if options.activation_checkpointing:
            checkpoint_activations(task, model)
        compared = samples_to_compare(samples, world_size=ctx.world_size)
        state = {"state of the task": task_state.digest(task_state.state_of(task))}
        ctx.before_wait()  # until the others have read their data and built their models, which DDP compares
        require_same_data(compared, {**ctx.request, **state})
        self.model = wrap(model, options, device=ctx.device, world_size=ctx.world_size)
        self.accumulation = Accumulation(self.model)
        self.raw_model = unwrap(self.model)
        self.autocast = autocast(options, ctx.device)
        metrics = check_loss(task, self.raw_model, sample_batches, ctx, autocast=self.autocast)
        self.best = Best.of(options)
        if metrics is not None and self._validates:
            self.best.require_known(metrics)
        seed_all(mix_seed(options.seed, ctx.rank))  # dropout differs between ranks, and is reproducible
        self.parameters = trainable(self.raw_model)
        self.optimizer = training_optimizer(task, self.raw_model, options)
        self._use = ParameterUse(self.model, raw_model=self.raw_model, parameters=self.parameters, ctx=ctx)
        self.schedule = Schedule(options, self.optimizer)
        self.average = WeightAverage(self.raw_model, decay=options.ema_decay)
        self.scaler = LossScaler(ctx.device, enabled=options.precision == "fp16")
        wire = compression(options)
        self._compresses = wire.hook is not None
        self.meter = StepMeter(
            self.model,
            device=ctx.device,
            writer=ctx.writer,
            rank=ctx.rank,
            detail_every=options.sync_detail_every,
            comm_hook=wire.hook,
            wire_ratio=wire.wire_ratio,
            sparse=task.sparse_parameters(self.raw_model),
        )
        self._copies = ctx.copies or host_copies(ctx.device)
        self._to_device = batch_copy(ctx.device)
        choose_algorithms(options, ctx.device, few_shapes=task.lengths("train") is None)
        self._finite = FiniteCheck(
            task, self.raw_model, autocast=self.autocast, scaled=self.scaler.enabled, copies=self._copies
        )
        self._tests = options.test and "test" in self.splits
        self._best_weights = BestWeights(wanted=self._tests and options.test_best and ctx.rank == 0)
        self._holds_best = False
        """Whether the model holds the best weights in place of the last ones, at the very end."""
        self.epoch = 1
        self._data_rank = 0
        """A rank that had data in the last step, if one had."""
        # One item per sample until a count is known; a far smaller estimate would overflow the first gradient in fp16.
        self._items = ItemCount(
            float(sum(batch_sizes(options, ctx.world_size)) * self._update_freq(1)),
            parameters=self.parameters,
            finite=None if self._copies is None else self._finite,
        )
        self._progress = reports.Progress(ctx, every=options.log_interval)
        self._validation_findings = reports.ValidationFindings(ctx)
        self._flops = FlopCount(options, ctx)
        self._desync = reports.DesyncReports(ctx, self.raw_model)
        self._saving = Saving(ctx, keep_last=options.keep_last, keep_last_epochs=options.keep_last_epochs)
        self.state = TrainingState(
            options=options,
            ctx=ctx,
            model=self.raw_model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            average=self.average,
            scaler=self.scaler,
            items=self._items,
            train_batches=self.train_batches,
            task=task,
            data_samples=samples,
            best=self.best,
            best_weights=self._best_weights,
            saving=self._saving,
        )
        self._start_time = time.monotonic()
        self._stopped = self._time_is_up = False

    @property
    def updates(self) -> int:
        """Optimizer steps done."""
        return self.state.updates

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self) -> TrainingOutcome:
        """Train until an end condition holds; then validate and save if the last update was not yet, and test.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
            OutOfMemoryError: memory ran out.
            NotKeptError: all updates are made, but the last checkpoint, or the best one, is not on disk.
            TrainingError: all updates are made, but the ranks hold different parameters.
        """
        reports.announce(
            self.ctx,
            self.options,
            samples=self.train_batches.samples,
            updates_per_epoch=self.train_batches.updates_per_epoch(self._update_freq(1)),
            first_update=self.updates,
            parameters=sum(parameter.numel() for parameter in self.parameters),
        )
        self.ctx.set_state("training")
        self.model.train()
        self.meter.start()
        agreement = self._agreement = Agreement(
            partial(distributed.max_async, copies=self.ctx.copies),
            self._requests,
            leads=self.ctx.rank == 0,
            first_update=self.updates,
        )
        step_times = StepTimes(self.ctx.step_took)
        if self.updates and self._due(self.options.valid_every_updates):
            self._validate()  # the resumed training was stopped before it
        tried = self.updates  # in fp16 not every step that is tried is taken
        while not (self._stopped or (reason := self.end_reason())):
            self.epoch = epoch = self.train_batches.position.epoch
            if self._update_freq(epoch) != self._update_freq(max(1, epoch - 1)):
                agreement.reschedule(tried)
            for update in self.train_batches.updates(self._update_freq(epoch)):
                stepped = self._update(update)
                tried += 1
                step_times.step_done()
                agreed = agreement.after(tried)
                self._stopped, self._time_is_up = agreed.stop, agreed.end
                if stepped and not self._stopped and self._due(self.options.valid_every_updates):
                    self._validate()
                if self._stopped:
                    return self._stop()
                if (stepped and self._due(self.options.save_every_updates)) or agreed.save:
                    self._save()
                if reason := self.end_reason():
                    break
            if not self.train_batches.updates_left(1):
                self._end_of_epoch(epoch)
                if self._stopped:
                    break
                self.train_batches.next_epoch()
                self.schedule.begin_epoch(self.train_batches.position.epoch)
        if not self._stopped:
            agreement.close()
            self._finish(reason)
        if self._stopped:
            return self._stop()
        return TrainingOutcome(updates=self.updates, epoch=self.epoch, reason=reason, best=self.best)

    def _update(self, update: Update) -> bool:
        """Make one optimizer step over the update's micro-batches of all ranks; return whether it was taken.

        The gradient is the exact mean over the items (samples, tokens) of the global batch: DDP averages over the W
        ranks, so each local sum is scaled by W / B, B being the items of all ranks and micro-steps. If B is not known
        beforehand, the last known B is used and the gradients are corrected after the reduction; with a compressing
        comm hook they are corrected before it, since half precision holds a mean but may not hold a sum. In fp16 a step
        whose gradient overflows is left out: it counts nowhere, and the loss scale is halved.
        """
        options, meter, device = self.options, self.meter, self.ctx.device
        self.optimizer.zero_grad(set_to_none=True)
        per_sample = self.task.count_per_sample
        denominator = update.global_samples * per_sample if per_sample else self._items.estimate
        grad_scale: Tensor | float = self.scaler.value
        loss_sum: Tensor | float = 0.0
        count: Tensor | int = 0
        samples = 0
        self._data_rank = update.data_rank
        for index, micro in enumerate(update):
            meter.lap("data")
            batch = self._to_device(micro.batch)
            meter.lap("h2d")
            last = index == update.micro_steps - 1
            samples += micro.samples
            # A dummy is for the other ranks' collectives; it counts for nothing.
            counted = nullcontext() if micro.samples else keep_buffers(self.raw_model)
            try:
                with self.accumulation(last=last), self._flops.count(batch, micro.samples), counted:
                    with self.autocast:
                        local_sum, local_count, _ = summed_loss(self.task, self.model, batch)
                    if not micro.samples:
                        local_sum, local_count = local_sum * 0.0, 0
                    count = count + local_count
                    if last and per_sample:
                        self._finite.require_items(count, samples=samples, step=self.updates + 1)
                    elif last:
                        self._items.begin(count, device)
                        if self._compresses:
                            self._items.correct(step=self.updates + 1)
                            denominator = self._items.estimate
                    meter.lap("forward")
                    loss_sum = loss_sum + self._finite.require_loss(local_sum, batch, step=self.updates + 1)
                    self._flops.begin_backward()
                    scaled = local_sum * factor_for(self.ctx.world_size / denominator, local_sum.dtype)
                    self.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
                    meter.lap("backward")
            except (RuntimeError, MemoryError) as error:
                if unused := self._use.describe(error):
                    raise RequestError(unused) from error
                if not is_out_of_memory(error):
                    raise
                cause = describe_out_of_memory(batch, error)
                raise OutOfMemoryError(f"out of memory at step {self.updates + 1}, {cause}") from error
        gradients = self._use.gradients(step=self.updates + 1)
        if not per_sample and not self._compresses:
            grad_scale *= self._items.correct(step=self.updates + 1)
        self.scaler.unscale_(self.optimizer)
        norm = clip(gradients, options.clip_norm)
        grad_norm = self._finite.require_gradient(norm, self.optimizer, step=self.updates + 1)
        if not self.scaler.step(self.optimizer):
            self._discard_step()
            return False
        self.average.update()
        self.state.updates += 1
        lr = self.schedule.lr
        self.schedule.step(self.updates)
        meter.lap("optimizer")
        # The samples of a rank may count no item; a count that is a tensor is not read, as that may be a sync point.
        loss = loss_sum / count if samples and (isinstance(count, Tensor) or count) else None
        meter.end(
            step=self.updates,
            epoch=self.epoch,
            loss=loss,
            samples=samples,
            tokens=samples * per_sample if per_sample and per_sample > 1 else None,
            lr=lr,
            grad_norm=grad_norm,
            grad_scale=grad_scale,
        )
        self._desync.finish()
        if self._due(options.desync_every):
            self._desync.begin(step=self.updates)
        self._progress(epoch=self.epoch, step=self.updates, loss=loss, lr=lr)
        return True

    def _discard_step(self) -> None:
        """Discard a step whose gradient overflowed.

        Raises:
            NonFiniteError: the loss scale is below ``--min-loss-scale``.
        """
        step, scaler = self.updates + 1, self.scaler
        self._finite.require_scale(scaler.value, self.options.min_loss_scale, step=step, left_out=scaler.left_out)
        self.meter.discard()
        self.ctx.print_line(f"step {step} was skipped: a gradient overflowed; the loss scale is now {scaler.value:g}")

    @property
    def validation_missing(self) -> bool:
        """Whether the last update still has to be validated, as that of every training with validation data."""
        return self._validates and self.state.validated_at != self.updates

    @property
    def _validates(self) -> bool:
        options = self.options
        return "valid" in self.splits and bool(options.valid_every_epochs or options.valid_every_updates)

    def end_reason(self) -> str:
        """Return why training makes no further update; empty if it makes one.

        Raises:
            TrainingError: only patience would end it, and the validations have no finite result.
        """
        if self._time_is_up:
            return f"stop_time {self.options.stop_time:g} minutes reached"
        self.best.require_end(self.options)
        if self.options.patience and self.best.since >= self.options.patience:
            return f"no better {self.best.metric} in {self.best.since} validations"
        epoch = self.train_batches.position.epoch
        return end_reached(self.options, epoch=epoch, updates=self.updates, lr=self.schedule.lr)

    def _requests(self) -> LoopRequests:
        """Return the requests of this rank; only those of rank 0 depend on the clock."""
        options, now = self.options, time.monotonic()
        by_time = self.ctx.rank == 0
        return LoopRequests(
            stop=self.ctx.stop_requested(),
            end=by_time and bool(options.stop_time) and now - self._start_time >= options.stop_time * 60,
            # A save has all ranks check their numbers, so a rank that found one that is not finite requests it.
            save=self._finite.found_bad()
            or (
                by_time
                and bool(options.save_every_minutes)
                and now - self._saving.last_time >= options.save_every_minutes * 60
            ),
        )

    def _stop(self) -> TrainingOutcome:
        """Save the last update, without a validation, since the user waits for the stop; return the outcome."""
        self.ctx.stopping()
        self._agreement.close()
        self._desync.finish()
        self.meter.close()
        self._save()
        not_kept = self._saving.close()
        saved = self._saving.path_of(self.updates)
        self.ctx.print_line(describe_stop(self.updates, None if saved is None else str(saved), not_kept))
        return TrainingOutcome(
            updates=self.updates,
            epoch=self.epoch,
            reason="asked to stop",
            best=self.best,
            stopped=True,
            saved=saved,
            not_kept=not_kept,
        )

    def _end_of_epoch(self, epoch: int) -> None:
        saves = bool(self.options.save_every_epochs) and epoch % self.options.save_every_epochs == 0
        ended = epoch if saves and self._saving.keeps_epochs else None
        if self.options.valid_every_epochs and epoch % self.options.valid_every_epochs == 0:
            self._validate(ended=ended)
        if not self._stopped and saves:
            self._save(ended=ended)

    def _finish(self, reason: str) -> None:
        """Validate and save if the last update was not yet, then test; return early if asked to stop.

        Raises:
            NotKeptError: the last checkpoint, or the best one, is not on disk.
            TrainingError: the ranks hold different parameters.
            NonFiniteError: the test's loss or a metric is not finite.
        """
        self._desync.finish()
        self.meter.close()
        if self.updates:
            self._validate()
        if self._stopped:
            return
        if self.updates:
            self._save()
        self._desync.begin(step=self.updates)
        self._desync.finish()
        untested = ""
        with self.average.in_place():
            if self.ctx.rank == 0 and (text := self.task.sample(self.raw_model)):
                reports.report_sample(self.ctx, text, step=self.updates)
        if self._tests:
            best = self.best
            if self.options.test_best and best.value is not None and best.step != self.updates:
                self._holds_best = self._best_weights.load_into(self.raw_model, best, self.ctx, last_step=self.updates)
            with nullcontext() if self._holds_best else self.average.in_place():
                result = self._evaluation("test")
            if result is None:
                return
            weights_step = best.step if self._holds_best else self.updates
            reports.report_validation(
                self.ctx, "test", result, step=self.updates, epoch=self.epoch, weights_step=weights_step
            )
            untested = result.non_finite
        self.ctx.stopping()  # a stop requested from here on waits for the disk
        if not_kept := self._saving.close():
            raise NotKeptError(f"trained, but {not_kept}")
        if difference := self._desync.unresolved:
            raise TrainingError(f"trained, but {difference}")
        if untested:
            raise NonFiniteError(f"trained, but the test is not finite: {untested}")
        self.ctx.print_line(f"finished: {reason}")

    # ------------------------------------------------------------------------------------------------ validation

    def _validate(self, *, ended: int | None = None) -> None:
        if not self.validation_missing:
            return
        self.meter.pause()
        self._sync_model()
        self.ctx.set_state("validating")
        with self.average.in_place():
            result = self._evaluation("valid")
            is_best = result is not None and self.best.add(result.loss, result.metrics, step=self.updates)
            if is_best:
                self._best_weights.keep(self.raw_model)
        if result is not None:
            self.state.validated_at = self.updates
            reports.report_validation(self.ctx, "valid", result, step=self.updates, epoch=self.epoch)
            self._validation_findings.add("valid", result, step=self.updates)
            if is_best and self._saving.enabled:
                self._save(best=True, ended=ended)
        self.ctx.set_state("training")
        self.meter.start()

    def _evaluation(self, split: str) -> Evaluation | None:
        """Evaluate a split; return None on all ranks if one of them was asked to stop meanwhile."""
        result = evaluate(
            self.task,
            self.raw_model,
            self.eval_batches[split],
            device=self.ctx.device,
            autocast=self.autocast,
            stop_requested=self.ctx.stop_requested,
            before_wait=self.ctx.before_wait,
        )
        self._stopped |= result is None
        return result

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _save(self, *, best: bool = False, ended: int | None = None) -> None:
        """Write a checkpoint of this update, unless there is one that is also kept as ``best`` and ``ended`` require.

        Args:
            best: whether the last validation was the best so far.
            ended: the epoch that ended here, if its checkpoint is kept as such.

        Raises:
            NonFiniteError: a loss, gradient, parameter or buffer is not finite.
        """
        if self._holds_best or (
            self._saving.last_update == self.updates and not best and ended in (None, self._saving.last_epoch)
        ):
            return
        self.meter.pause()
        self._sync_model()
        if self._saving.enabled:
            with self.average.in_place():
                self._saving.save(self.state.state_dict, step=self.updates, best=best, epoch=ended)
        self.meter.start()

    def _sync_model(self) -> None:
        """Check that the model is finite, and give all ranks the same buffers, before it is evaluated or saved.

        Raises:
            NonFiniteError: a loss, gradient, parameter or buffer is not finite.
        """
        self.ctx.before_wait()
        self._finite.require_all(step=self.updates)
        share_buffers(self.raw_model, source=self._data_rank)

    # ------------------------------------------------------------------------------------------------ small parts

    def _update_freq(self, epoch: int) -> int:
        return self.options.update_freq[min(epoch, len(self.options.update_freq)) - 1]

    def _due(self, every: int) -> bool:
        return bool(every) and self.updates % every == 0
