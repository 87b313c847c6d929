"""Recording of a script's steps from its calls of torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.contract.record import EventWriter, Finding
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.instrument.closures import with_closure
from trainer.telemetry.instrument.fetched_batches import BatchSize, FetchedBatches, plus, size_of_call
from trainer.telemetry.instrument.followed_models import FollowedModels
from trainer.telemetry.instrument.guarded import guarded
from trainer.telemetry.instrument.model_parallel import ModelParallelism, is_trained, is_training, is_wrapped
from trainer.telemetry.instrument.not_measured import UNSEEN_AFTER, UnseenSteps, print_line
from trainer.telemetry.instrument.optimizer_cycle import OptimizerCycle
from trainer.telemetry.instrument.outermost_calls import OutermostCalls
from trainer.telemetry.instrument.script_losses import StepLosses, is_made_of, newest_number
from trainer.telemetry.step_meter import Phase
from trainer.telemetry.step_tracker import StepTracker
from trainer.telemetry.torch_compile import CompilationReport


class Recording:
    """Recording of the steps of the script in this process.

    A step is all forward and backward passes up to an optimizer's step; with several optimizers ``OptimizerCycle``
    decides whose. The step of an optimizer without a backward pass before it does not count, nor one that a GradScaler
    leaves out; fused optimizers are called even then, so that theirs count.

    The phase ``forward`` is the forward pass of the outermost module and the loss: of the one that is wrapped in
    DistributedDataParallel, that is the root of FSDP, or, without such a wrapper, of the first trained one that is
    called. Where no such call is seen, it is the time from a batch's arrival to the backward pass. Time between a
    forward pass that returned the loss itself and the backward pass is the script's own code.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.on = True
        self.thread: int | None = None
        """The one that trains; None before it has begun."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called once, when the script begins to train."""
        self.optimizer_steps = 0
        self.collectives = CollectiveMeter()
        self.unseen = UnseenSteps(rank, self._write)
        self._path = path
        self._rank = rank
        self._writer = EventWriter(None)
        self._tracker: StepTracker | None = None
        self._closing = threading.Lock()
        self.models = FollowedModels()
        self._wrapped: WeakSet[nn.Module] = WeakSet()
        """Outermost modules that a wrapper told of: DistributedDataParallel, or a root of FSDP."""
        self._called: WeakSet[nn.Module] = WeakSet()
        """Those of them that were called in this step; once a step has called several, all that any has called."""
        self._bare: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        """Modules without a wrapper whose calls were seen, with whether they are trained."""
        self.parallelism = ModelParallelism()
        self._calls = OutermostCalls(self._begin_bare, self._end_bare)
        self._misses_calls = False
        """Whether calls of modules without a wrapper were not seen in this step: its samples are not all known."""
        self._output_place: int | None = None
        """Place in autograd's order of a number that the last forward pass returned; None without one."""
        self._cycle = OptimizerCycle()
        self._stepping: Optimizer | None = None
        """The optimizer in whose step the script is."""
        self._in_backward = False
        self._after_backward = False
        """Whether neither gradients nor parameters were changed since the last backward pass."""
        self._ends_after_backward: Optimizer | None = None
        """The optimizer that has stepped within the backward pass and ended the iteration."""
        self._backwards = 0
        self.losses = StepLosses()
        self._closure_size: BatchSize = (0, None)
        """Samples and tokens of the step after the first call of an optimizer's closure."""
        self.batches = FetchedBatches()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def steps(self) -> int:
        return 0 if self._tracker is None else self._tracker.step

    def close(self, *, handed_over: bool = False, failed: bool = False) -> str:
        """Write the last steps and stop measuring; return why the end of the record is not on disk, empty if it is."""
        with self._closing:
            if self.on and not handed_over and not failed and not self.steps:
                self._report_unmeasured(at_end=True)
            self.on = False
            self._calls.stop()
            tracker, other_thread = self._tracker, self.thread != threading.get_ident()
            if tracker is not None and self._writer.enabled:
                if not failed and not other_thread:
                    tracker.check_last_step()
                tracker.write_checksum()
                tracker.report_unseen(loss=self.losses.unseen, samples=self.parallelism.unknown or self.batches.unknown)
                tracker.meter.close(other_thread=other_thread)
            self._writer.close()
            return self._writer.write_error

    def _report_unmeasured(self, *, at_end: bool = False) -> None:
        backward = self._tracker is not None or (None if at_end and self._calls.is_awaited else False)
        self.unseen.report(self.optimizer_steps, backward=backward, earlier=self.steps > 0, at_end=at_end)

    def _write(self, finding: Finding) -> None:
        self._open_record()
        self._writer.write(finding)

    def _open_record(self) -> None:
        if not self._writer.enabled:
            self._writer = EventWriter(self._path, rank=self._rank)

    def await_compiler(self) -> None:
        if self.on and self._tracker is None:
            self._open_record()
            report = CompilationReport(self._writer, self._rank, lambda: self.on and self._tracker is None)
            self._writer.before_each_write(report.check)

    def fail(self, error: Exception) -> None:
        if self.on:
            self._stop()
            print_line(f"this training is no longer measured: {type(error).__name__}: {error}")

    def _forget(self) -> None:
        """Measure nothing in a forked process, such as a data loading process."""
        self._stop()
        self._tracker = None

    def _stop(self) -> None:
        self.on = False
        self._calls.stop()
        self.collectives.close()

    # ------------------------------------------------------------------------------------------ forward, backward

    @guarded
    def await_training(self, optimizer: Optimizer) -> None:
        """Await the first call of a module, because an optimizer is made, so that the first step is measured whole."""
        self._cycle.made.add(optimizer)
        if self._tracker is None:
            self._calls.await_next()

    @guarded
    def begin_forward(
        self, model: nn.Module, arguments: Sequence[Any], named: Mapping[str, Any], device: torch.device | None = None
    ) -> None:
        """Begin the forward pass of a wrapped model; ``device``: where it computes, if not where its parameters are."""
        if self._in_backward:
            return  # activation checkpointing
        if not is_training(model):
            if self._tracker is not None and not self.batches.are_trained_on:
                self._tracker.mark_evaluation()
            return
        tracker = self._tracker
        if tracker is None:
            parameter = next(model.parameters(), None) if device is None else None
            tracker = self._begin(device or (torch.device("cpu") if parameter is None else parameter.device))
        if isinstance(model, DistributedDataParallel):
            self.models.follow(model, tracker)
            self.parallelism.note_replicas(model)
        if model not in self._wrapped:
            if not self._wrapped:
                # Those of a module without a wrapper are a part of the same batch.
                tracker.samples = self.batches.calls = 0
            self._wrapped.add(model)
            self._calls.stop()
        tracker.mark(self._open_phase(tracker), then="forward")
        tracker.epoch += self.batches.train()
        self._called.add(model)
        self.batches.calls += 1
        if len(self._called) == 1:
            tracker.size = plus(tracker.size, size_of_call(arguments, named))

    @guarded
    def end_forward(self, model: nn.Module, output: Any) -> None:
        tracker = self._tracker
        if tracker is None or tracker.open_phase != "forward" or self._in_backward or not is_training(model):
            return
        self.parallelism.note_exchange(self.collectives.calls_of_phase, model if self._wrapped else None)
        tracker.mark("forward", then="forward")  # the loss may be computed next, which is the same phase
        tracker.forward_done = True
        self._output_place = newest_number(output)
        if isinstance(model, DistributedDataParallel):
            tracker.synchronises |= bool(model.require_backward_grad_sync)

    @guarded
    def _begin_bare(self, module: nn.Module) -> bool:
        """Begin the forward pass of a module without a wrapper; return whether it is the awaited one."""
        tracker = self._tracker
        if self._in_backward or (tracker is not None and tracker.open_phase == "data"):
            return False
        if not (torch.is_grad_enabled() and module.training):
            if tracker is not None and self._bare.get(module) and not (module.training or self.batches.are_trained_on):
                tracker.mark_evaluation()
            return False
        trained = self._bare.get(module)
        if trained is None:
            trained = self._bare[module] = is_trained(module) and not is_wrapped(module)
        if trained and tracker is None:
            tracker = self._begin(next(parameter.device for parameter in module.parameters()))
        if trained and tracker is not None:
            # What lies between a batch's arrival and the call is the script's own code.
            phase = "other" if tracker.open_phase == "forward" else self._open_phase(tracker)
            tracker.mark(phase, then="forward")
            tracker.epoch += self.batches.train()
        return trained

    @guarded
    def _end_bare(self, module: nn.Module, arguments: Sequence[Any], named: Mapping[str, Any], output: Any) -> None:
        if self._in_backward or not is_training(module):
            return
        if self.batches.call():
            return
        self.end_forward(module, output)
        if self._tracker is not None and list(self._bare.values()).count(True) == 1:
            self._tracker.size = plus(self._tracker.size, size_of_call(arguments, named))
        else:
            self._misses_calls = True

    @guarded
    def begin_compiled(self, module: nn.Module) -> bool:
        """Begin the forward pass of a compiled module without a wrapper; return whether it is the awaited one."""
        return self._tracker is not None and not self._wrapped and self._calls.begins_with(module)

    @guarded
    def begin_backward(self, outputs: Any, device: torch.device | None = None) -> bool:
        """Return whether the backward pass is measured: one within another is not.

        ``device``: that of a pipeline's stage, of which ``outputs`` is the loss on a micro-batch, None without one.
        """
        if self._in_backward:
            return False
        given = (
            [outputs] if isinstance(outputs, Tensor) else [each for each in outputs or () if isinstance(each, Tensor)]
        )
        output = given[0] if given else None
        device = device if output is None else output.device
        if device is None:
            return False
        self._misses_calls |= self._tracker is None
        tracker = self._begin(device)
        phase = self._open_phase(tracker)
        if output is not None and tracker.forward_done and is_made_of(output, self._output_place):
            phase = "other"
        self._output_place = None
        tracker.mark(phase, then="backward", trained=True)
        tracker.epoch += self.batches.train()
        self._in_backward = True
        self._calls.end_calls()
        called = self.batches.is_called
        kept = self.batches.begin_backward(tracker.size, self.optimizer_steps, alone=len(self._cycle.made) == 1)
        if kept is not None:
            tracker.size = kept
            self.losses.clear()
        if output is not None and (scale := self.losses.add(given, called=called)) is not None:
            tracker.grad_scale = scale
        return True

    @guarded
    def end_stage_forward(self, stage: Any, targets: Any, index: int) -> None:
        """End the forward pass of a pipeline's stage on the micro-batch of this index."""
        if stage.has_backward:
            self.parallelism.add_micro_batch(stage, targets, index)
        elif self._tracker is not None:
            self._tracker.mark_evaluation()

    @guarded
    def end_backward(self, *, passed: bool = True) -> None:
        """Without ``passed`` it raised an exception."""
        self._in_backward = False
        if self._tracker is None:
            return
        if passed:
            self._backwards += 1
            if self._backwards == UNSEEN_AFTER and not self.optimizer_steps and not self.unseen.are_reported:
                self._report_unmeasured()
        else:
            self.losses.remove_last()
        if self.parallelism.gathered:
            self.parallelism.note_gradients(self.collectives.calls_of_phase)
        self._tracker.mark("backward", then="optimizer")
        self._after_backward = self._stepping is None
        if self._ends_after_backward is not None:
            optimizer, self._ends_after_backward = self._ends_after_backward, None
            self._end(self._tracker, optimizer)
        self._calls.await_next()

    def begin_compiling(self) -> None:
        """Await no calls from here on: torch.compile would trace what awaits them."""
        self._calls.stop()

    # ------------------------------------------------------------------------------------------ optimizer

    @guarded
    def begin_gradients(self) -> None:
        """Begin to clip or unscale gradients, or the optimizer's step: before that a script may have read its data."""
        tracker = self._tracker
        if tracker is not None and self._after_backward and tracker.open_phase == "optimizer" and not tracker.evaluated:
            tracker.mark("other", then="optimizer")
        self._after_backward = False

    @guarded
    def begin_optimizer(
        self, optimizer: Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin an optimizer's step, within which there may be forward and backward passes.

        Return other arguments for it, with a closure whose calls are followed; None if it gets those of the script.
        """
        self.optimizer_steps += 1
        if self._stepping is not None and self._stepping is not optimizer:
            self._cycle.made.discard(optimizer)
            return None  # the step of an optimizer within that of another
        self._stepping = optimizer
        tracker = self._tracker
        self.unseen.optimizer_steps += 1
        if self.unseen.optimizer_steps == UNSEEN_AFTER:
            self._report_unmeasured()
        if tracker is not None and not self._in_backward:
            tracker.stepping = True
            if tracker.evaluated or tracker.open_phase != "optimizer":
                tracker.mark(then="optimizer")
            else:
                self.begin_gradients()
        return with_closure(optimizer, arguments, named, self._end_closure)

    @guarded
    def _end_closure(self) -> None:
        tracker, first = self._tracker, self.losses.end_closure()
        if tracker is not None:
            self._closure_size = tracker.size = tracker.size if first else self._closure_size

    @guarded
    def end_optimizer(self, optimizer: Optimizer) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        self.losses.end_optimizer()
        if self._tracker is None:
            return
        self._tracker.stepping = False
        if not self._in_backward:
            self._tracker.mark("optimizer")
        if not self._backwards and not self._in_backward:
            self._cycle.made.discard(optimizer)
            return
        role = self._cycle.step(optimizer, same_batch=self.batches.are_same)
        if role == "ends" and self._in_backward:
            self._ends_after_backward = optimizer
        elif role != "belongs" and not self._in_backward:
            self._end(self._tracker, optimizer, extends=role == "extends")

    @guarded
    def skip_optimizer(self, optimizer: Optimizer) -> None:
        if self._tracker is not None and self._cycle.ends_with(optimizer):
            self._discard(self._tracker)

    # ------------------------------------------------------------------------------------------ data

    @guarded
    def begin_data(self, iterator: Any) -> bool:
        """Return whether the batch of a DataLoader's iterator may be trained on."""
        tracker = self._tracker
        if tracker is None:
            return torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            tracker.mark_evaluation()
            return False
        if self.batches.were_evaluated(iterator):
            tracker.mark_evaluation()
        tracker.mark(self._open_phase(tracker), then="data")
        return True

    @guarded
    def end_data(self, iterator: Any, batch: Any) -> None:
        if self._tracker is None:
            self.batches.await_training(iterator, batch)
            return
        self._tracker.mark("data", then="other" if self._wrapped else "forward")
        is_needed = len(self._wrapped) != 1 or self.batches.are_needed or not self._tracker.step
        self.batches.add(iterator, batch if is_needed else None)
        self._calls.await_next()

    @guarded
    def end_epoch(self, iterator: Any) -> None:
        if self._tracker is None:
            self.batches.end_untrained(iterator)
            return
        if self.batches.end(iterator):
            self._tracker.mark_evaluation()
        elif self._after_backward:
            self.batches.end_epoch(self._tracker.size)
        self._tracker.mark("other")

    # ------------------------------------------------------------------------------------------ steps

    def _begin(self, device: torch.device) -> StepTracker:
        # A step without an end is dropped after so many: a training whose optimizer is not seen must not fill memory.
        max_laps = 100_000
        if self._tracker is None:
            self.thread = threading.get_ident()
            self.on_begin()
            self._open_record()
            tracker = self._tracker = StepTracker(self._writer, rank=self._rank, device=device)
            tracker.meter.follow_collectives(self.collectives, lambda: tracker.open_phase == "backward")
            tracker.start()
        elif self._tracker.laps > max_laps:
            self._discard(self._tracker)
        return self._tracker

    def _open_phase(self, tracker: StepTracker) -> Phase:
        """Return the phase since the last mark; ``other`` after a backward pass, outside optimizer steps."""
        after_backward = tracker.open_phase == "optimizer" and self._stepping is None
        return "other" if after_backward else tracker.open_phase

    def _end(self, tracker: StepTracker, optimizer: Optimizer, *, extends: bool = False) -> None:
        steps = self._cycle.take_steps()
        tracker.loss = self.losses.total(tracker.device) if steps == 1 else None
        one = len(self._called) < 2
        called = None if self._misses_calls or not one or not tracker.size[0] else tracker.size
        size = self.batches.end_step(called, is_wrapped=len(self._wrapped) == 1 and one, extends=extends)
        tracker.size = self.parallelism.size_to_count(size, optimizer, self.collectives.sends, tracker.loss)
        if self.parallelism.pipelined is not None:
            self.batches.unknown = ""  # micro-batches count, on the rank of the last stage
        tracker.end(optimizer, steps, extends=extends, may_go_on=self._cycle.may_go_on)
        self.unseen.end_step()
        self._begin_step()

    def _discard(self, tracker: StepTracker) -> None:
        tracker.discard()
        self._begin_step()

    def _begin_step(self) -> None:
        self._backwards = 0
        if len(self._called) == 1:
            self._called.clear()
        self.losses.clear()
        self.batches.begin_step()
        self.parallelism.pipelined = None
        self._misses_calls = False
