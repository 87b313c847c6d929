"""The training loop: step, accumulate, validate, save, stop.

`Loop.run` is the loop itself; `Loop._update` is one optimizer step. Data and model are built in `preparation.py`; the
entries of a checkpoint, and resuming, are in `training_state.py`.
"""

from __future__ import annotations

import time
from functools import partial

from torch import Tensor

from trainer import distributed
from trainer.contract.errors import NotKeptError, TrainingError
from trainer.contract.options import Training
from trainer.contract.outcome import ENDED_EARLY, describe_stop
from trainer.data.batches import Update
from trainer.data.loader import mix_seed
from trainer.data.seeds import seed_all
from trainer.data.shares import rank_batch_sizes
from trainer.distributed.host_copies import host_copies
from trainer.engine import reports
from trainer.engine.accelerator import choose_algorithms
from trainer.engine.agreement import Agreement, LoopRequests
from trainer.engine.batch_gradient import BatchGradient
from trainer.engine.checkpointing import Saving
from trainer.engine.compilation import Compilation
from trainer.engine.ddp_model import autocast, compression, share_buffers, trainable
from trainer.engine.ema import weight_average
from trainer.engine.end_conditions import StepTimes, TrainingOutcome, end_reached, last_update, update_freq
from trainer.engine.item_count import ItemCount
from trainer.engine.loss_check import check_loss
from trainer.engine.model_flops import FlopCount
from trainer.engine.muon import require_equal_products
from trainer.engine.noise_scale import NoiseMeter
from trainer.engine.non_finite import FiniteCheck, NonFiniteError
from trainer.engine.optimizers import LossScaler, Schedule, falling_end, training_optimizer, without_optimizer
from trainer.engine.parameter_use import ParameterUse
from trainer.engine.preparation import build_model, read_data, require_same_on_ranks, strategy_of
from trainer.engine.row_gradients import RowGradients
from trainer.engine.share_balance import ShareBalance, measures_steps
from trainer.engine.step_metrics import StepMetrics
from trainer.engine.training_state import TrainingState
from trainer.engine.validation import Validator
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task
from trainer.telemetry.step_meter import StepMeter


class Loop:
    """One rank's training, from a task and options to an outcome."""

    def __init__(self, task: Task, options: Training, ctx: WorkerContext) -> None:
        self.task, self.options, self.ctx = task, options, ctx
        self.data = read_data(task, options, ctx)
        model = build_model(task, options, self.data)
        require_same_on_ranks(task, self.data.samples, ctx)  # before DDP, which compares the models
        self.strategy = strategy_of(task, model, options, ctx)
        del model
        self.model, self.raw_model = self.strategy.model, self.strategy.module
        self.parameters = trainable(self.raw_model)
        self.autocast = autocast(options, ctx.device)
        metrics = check_loss(task, self.raw_model, self.data.loss_check, ctx, autocast=self.autocast)
        self.optimizer = training_optimizer(task, self.raw_model, options)
        self.average = weight_average(self.raw_model, self.optimizer, options)
        self._validation = Validator(
            task, options, ctx, self.data, self.strategy, self.average, self.autocast, metrics=metrics
        )
        self.best = self._validation.best
        seed_all(mix_seed(options.seed, ctx.rank))  # dropout differs between ranks, and is reproducible

        require_equal_products(self.optimizer, ctx)
        held = [each for group in self.optimizer.param_groups for each in group["params"]]
        self._differentiated = list(dict.fromkeys([*self.parameters, *held]))
        """Also what no group holds, whose gradients would add up and be in the norm; ``zero_grad`` is slower."""
        reports.finding(
            ctx,
            "not_optimized",
            without_optimizer(self.optimizer, self.raw_model),
            severity="warning",
            advice="add it to the task's optimizer, or freeze it with requires_grad_(False)",
        )
        self.schedule = Schedule(options, self.optimizer, end=falling_end(options, self.data.train))
        self.scaler = LossScaler(ctx.device, enabled=options.precision == "fp16")
        comm_hook, wire_ratio = compression(options)
        sparse = task.sparse_parameters(self.raw_model)
        self.meter = StepMeter(
            self.model,
            device=ctx.device,
            writer=ctx.writer,
            rank=ctx.rank,
            detail_every=options.sync_detail_every,
            comm_hook=comm_hook,
            wire_ratio=wire_ratio,
            sparse=sparse,
            keeps_steps=measures_steps(options, ctx.world_size),
        )
        self.strategy.measure(self.meter)
        self._balance = ShareBalance(options, ctx, task, self.data.train, meter=self.meter)
        choose_algorithms(options, ctx.device, few_shapes=task.lengths("train") is None)
        self._use = ParameterUse(self.strategy, parameters=self.parameters, ctx=ctx)
        copies = ctx.copies or host_copies(ctx.device)
        self._finite = FiniteCheck(task, self.strategy, self.autocast, scaled=self.scaler.enabled, copies=copies)
        self._items = ItemCount(
            ctx,
            per_sample=task.count_per_sample,
            # One per sample until they are known; a far smaller number would overflow the first gradient in fp16.
            estimate=float(sum(rank_batch_sizes(options, ctx.world_size)) * options.update_freq[0]),
            parameters=self.parameters,
            finite=self._finite,
            before_reduction=comm_hook is not None,
        )
        self._compilation = Compilation(task, self.model, options, ctx, self.autocast)
        self._flops = FlopCount(options, ctx, self._compilation)
        self._progress = reports.Progress(ctx, every=options.log_interval)
        self._desync = reports.DesyncReports(ctx, self.raw_model)
        self._noise = NoiseMeter(self.model, options, ctx)
        self._metrics = StepMetrics(task, ctx)
        self._gradient = BatchGradient(
            task=task,
            options=options,
            ctx=ctx,
            strategy=self.strategy,
            parameters=self.parameters,
            autocast=self.autocast,
            meter=self.meter,
            items=self._items,
            finite=self._finite,
            scaler=self.scaler,
            metrics=self._metrics,
            use=self._use,
            flops=self._flops,
            compilation=self._compilation,
            balance=self._balance,
        )
        alone = ctx.world_size == 1 and ctx.device.type == "cpu" and ctx.copies is None and options.compile == "off"
        self._rows = RowGradients(self.raw_model, sparse if alone else ())  # last, since it changes embeddings
        self.saving = Saving(ctx, self.strategy, keep_last=options.keep_last, keep_last_epochs=options.keep_last_epochs)
        self.state = TrainingState(
            options=options,
            ctx=ctx,
            model=self.raw_model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            average=self.average,
            scaler=self.scaler,
            items=self._items,
            task=task,
            data=self.data,
            validation=self._validation,
            saving=self.saving,
            balance=self._balance,
        )
        self.epoch = 1
        self._start_time = time.monotonic()
        self._stopped = self._time_is_up = False
        self._data_rank = 0
        """A rank that had data in the last step, if one had."""

    @property
    def updates(self) -> int:
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
            samples=self.data.train.samples,
            updates_per_epoch=self.data.train.updates_per_epoch(self.options.update_freq[0]),
            first_update=self.updates,
            last_update=last_update(self.options, self.data.train, updates=self.updates),
            parameters=sum(parameter.numel() for parameter in self.parameters),
            best=self.best,
        )
        position = self.data.train.position
        self.epoch = max(1, position.epoch - (not position.consumed))  # the end of an epoch is the start of the next
        self.ctx.set_state("training")
        self.model.train()
        self.meter.start()
        self._balance.start(step=self.updates + 1)
        agreement = self._agreement = Agreement(
            partial(distributed.max_async, copies=self.ctx.copies),
            self._requests,
            leads=self.ctx.rank == 0,
            first_update=self.updates,
            most_updates=self._balance.most_updates,
        )
        step_times = StepTimes(self.ctx.step_took)
        if self.updates and self._due(self.options.valid_every_updates):
            self._validate()  # the resumed training was stopped before it
        tried = self.updates  # in fp16 not every step that is tried is taken
        while not (self._stopped or (reason := self.end_reason())):
            self.epoch = epoch = self.data.train.position.epoch
            freq = update_freq(self.options, epoch)
            if freq != update_freq(self.options, max(1, epoch - 1)):
                agreement.reschedule(tried)
            for update in self.data.train.updates(freq):
                stepped = self._update(update)
                tried += 1
                step_times.step_done()
                agreed = agreement.after(tried)
                self._stopped, self._time_is_up = agreed.stop, agreed.end
                self._balance.agree(agreed.numbers, step=self.updates + 1)
                if stepped and not self._stopped and self._due(self.options.valid_every_updates):
                    self._validate()
                if self._stopped:
                    return self._stop()
                if (stepped and self._due(self.options.save_every_updates)) or agreed.save:
                    self._save()
                if reason := self.end_reason():
                    break
            if not self.data.train.updates_left(1):
                self._end_of_epoch(epoch)
                if self._stopped:
                    break
                self.data.train.next_epoch()
                self.schedule.begin_epoch(self.data.train.position.epoch)
        if not self._stopped:
            agreement.close()
            self._finish(reason)
        if self._stopped:
            return self._stop()
        return TrainingOutcome(updates=self.updates, epoch=self.epoch, reason=reason, best=self.best)

    def _update(self, update: Update) -> bool:
        """Make one optimizer step over the micro-batches of all ranks; return whether it was taken.

        The gradient is the exact mean over the items (samples, tokens) of the global batch, see ``ItemCount``. In fp16
        a step whose gradient overflows is left out: it counts nowhere, and the loss scale is halved.
        """
        step, meter, items, finite = self.updates + 1, self.meter, self._items, self._finite
        for parameter in self._differentiated:
            parameter.grad = None
        self._rows.clear()
        items.begin_step(update, step=step)
        self._data_rank = update.data_rank
        loss_sum: Tensor | float = 0.0
        for micro, last in self._balance.micro_batches(update, step=step):
            meter.lap("data")
            loss_sum = loss_sum + self._gradient.add(micro, step=step, last=last)
        rows = self._rows.fill() or meter.nonzero_rows
        gradients = self._use.gradients(step=step)
        grad_scale = items.correct_gradients() * self.scaler.value
        self.scaler.unscale_(self.optimizer)
        norm = self.strategy.clip(gradients, self.options.clip_norm, rows)
        grad_norm = finite.require_gradient(norm, self.optimizer, step=step)
        if not self.scaler.step(self.optimizer):
            self._discard_step()
            return False
        self.average.update(step)
        self.state.updates, lr = step, self.schedule.lr
        self.schedule.step(step)
        meter.lap("optimizer")
        self._report_step(items.mean(loss_sum), lr=lr, grad_norm=grad_norm, grad_scale=grad_scale)
        return True

    def _report_step(
        self, loss: Tensor | float | None, *, lr: float, grad_norm: Tensor | float, grad_scale: Tensor | float
    ) -> None:
        """Record a step, and compare the models of the ranks if it is time to."""
        self.meter.end(
            step=self.updates,
            epoch=self.epoch,
            loss=loss,
            samples=self._items.samples,
            tokens=self._items.tokens,
            lr=lr,
            grad_norm=grad_norm,
            grad_scale=grad_scale,
        )
        self._metrics.after_step(self.updates)
        self._noise.after_step(
            step=self.updates, samples=self._items.samples, own=self.meter.local_norm, norm=grad_norm, scale=grad_scale
        )
        self._compilation.after_step(self.updates)
        self._desync.finish()
        if self._due(self.options.desync_every):
            self._desync.begin(step=self.updates)
        self._progress(epoch=self.epoch, step=self.updates, loss=loss, lr=lr)

    def _discard_step(self) -> None:
        step, scaler = self.updates + 1, self.scaler
        self._finite.require_scale(scaler.value, self.options.min_loss_scale, step=step, left_out=scaler.left_out)
        self.meter.discard()
        self.ctx.print_line(f"step {step} was skipped: a gradient overflowed; the loss scale is now {scaler.value:g}")

    @property
    def validation_missing(self) -> bool:
        """Whether the last update still has to be validated, as that of every training with validation data."""
        return self._validation.enabled and self.state.validated_at != self.updates

    def end_reason(self) -> str:
        """Return why training makes no further update; empty if it makes one."""
        if self._time_is_up:
            return f"stop_time {self.options.stop_time:g} minutes reached"
        if reason := self.best.end_reason(self.options):
            return reason
        if reason := end_reached(self.options, epoch=self.data.train.position.epoch, updates=self.updates):
            return reason
        low = self.schedule.lr <= self.options.min_lr
        return f"the learning rate is not above min_lr {self.options.min_lr:g}" if low else ""

    def _requests(self) -> LoopRequests:
        """Return this rank's requests; only those of rank 0 depend on the clock."""
        options, ctx = self.options, self.ctx

        def passed(minutes: float, since: float) -> bool:
            return ctx.rank == 0 and bool(minutes) and time.monotonic() - since >= minutes * 60

        return LoopRequests(
            stop=ctx.stop_requested(),
            end=passed(options.stop_time, self._start_time),
            # A save has all ranks check their numbers, so a rank that found one that is not finite requests it.
            save=self._finite.found_bad() or passed(options.save_every_minutes, self.saving.last_time),
            numbers=self._balance.numbers(),
        )

    def _stop(self) -> TrainingOutcome:
        """Save the last update, without a validation, since the user waits for the stop; return the outcome."""
        self.ctx.stopping()
        self._agreement.close()
        self._desync.finish()
        self._noise.finish()
        self._metrics.after_step(self.updates, last=True)
        self.meter.close()
        self._save()
        not_kept = self.saving.close()
        saved = self.saving.path_of(self.updates)
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
        ended = epoch if saves and self.saving.keeps_epochs else None
        if self.options.valid_every_epochs and epoch % self.options.valid_every_epochs == 0:
            self._validate(ended=ended)
        if not self._stopped and saves:
            self._save(ended=ended)

    def _finish(self, reason: str) -> None:
        """Validate and save if the last update was not yet, then test; return early if asked to stop."""
        self._desync.finish()
        self._noise.finish()
        self._metrics.after_step(self.updates, last=True)
        self.meter.close()
        if self.updates:
            self._validate()
        if self._stopped:
            return
        if self.updates:
            self._save()
        self._desync.begin(step=self.updates)
        self._desync.finish()
        non_finite = self._validation.test(step=self.updates, epoch=self.epoch)
        if non_finite is None:
            self._stopped = True
            return
        self.ctx.stopping()  # a stop requested from here on waits for the disk
        if not_kept := self.saving.close():
            raise NotKeptError(f"trained, but {not_kept}")
        if difference := self._desync.unresolved:
            raise TrainingError(f"trained, but {difference}")
        if non_finite:
            raise NonFiniteError(f"trained, but the test is not finite: {non_finite}")
        if end_reached(self.options, epoch=self.data.train.position.epoch, updates=self.updates):
            self.ctx.print_line(f"finished: {reason}")
        else:
            reports.finding(self.ctx, ENDED_EARLY, f"finished: {reason}", step=self.updates)

    # ------------------------------------------------------------------------------------------------ validation

    def _validate(self, *, ended: int | None = None) -> None:
        if not self.validation_missing:
            return
        self.meter.pause()
        self._sync_model()
        self.ctx.set_state("validating")
        is_best = self._validation.validate(step=self.updates, epoch=self.epoch)
        if is_best is None:
            self._stopped = True
        else:
            self.state.validated_at = self.updates
            if is_best and self.saving.enabled:
                self._save(best=True, ended=ended)
        self.ctx.set_state("training")
        self.meter.start()

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _save(self, *, best: bool = False, ended: int | None = None) -> None:
        """Write a checkpoint of this update, unless there is one that is also kept as ``best`` and ``ended`` require.

        ``ended`` is the epoch that ended here, if its checkpoint is kept as such.
        """
        if self._validation.model_has_best or (
            self.saving.last_update == self.updates and not best and ended in (None, self.saving.last_epoch)
        ):
            return
        self.meter.pause()
        self._sync_model()
        if self.saving.enabled:
            with self.average.in_place():
                self.saving.save(self.state.state_dict, step=self.updates, best=best, epoch=ended)
        self.meter.start()

    def _sync_model(self) -> None:
        """Check that the model is finite, and give all ranks the same buffers, before it is evaluated or saved."""
        self.ctx.before_wait()
        self._finite.require_all(step=self.updates)
        share_buffers(self.raw_model, source=self._data_rank)

    # ------------------------------------------------------------------------------------------------ small parts

    def _due(self, every: int) -> bool:
        return bool(every) and self.updates % every == 0
