"""Recording of a script's steps from its calls of torch."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.contract.record import EventWriter, Finding
from trainer.telemetry.comm_hook import BucketHook, CommHook, HookRelay
from trainer.telemetry.instrument.fetched_batches import FetchedBatches, plus, size_of
from trainer.telemetry.instrument.optimizer_cycle import OptimizerCycle
from trainer.telemetry.step_meter import Phase
from trainer.telemetry.step_tracker import StepTracker
from trainer.telemetry.torch_compile import CompilationReport

R = TypeVar("R")


def _guarded(method: Callable[..., R]) -> Callable[..., R | None]:
    """Call a method only in the thread that trains; the first fault in it ends the measuring, not the training."""

    @functools.wraps(method)
    def guarded(self: Recording, *arguments: Any, **named: Any) -> R | None:
        if not self.on or (self.thread is not None and self.thread != threading.get_ident()):
            return None
        try:
            return method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, the script's training goes on
            self.fail(error)
            return None

    # torch.compile calls it instead of tracing into it; torch.compiler.disable would import the compiler for that.
    guarded._torchdynamo_disable = True  # type: ignore[attr-defined]
    return guarded


class Recording:
    """Recording of the steps of the script in this process.

    A step is all forward and backward passes up to an optimizer's step; with several optimizers ``OptimizerCycle``
    decides whose. The step of an optimizer without a backward pass before it does not count, nor one that a GradScaler
    leaves out; fused optimizers are called even then, so that theirs count.

    The loss of a step is the sum of the scalars on which backward was called, before a GradScaler scaled them: the
    step's gradient is the gradient of that sum. Scripts that accumulate divide by the number of passes, which makes it
    their mean.

    If a model is wrapped in DistributedDataParallel, the phase ``forward`` is its forward pass and the loss; otherwise
    it is the time from a batch's arrival to the backward pass.

    Args:
        path: The event file.
        rank: Rank in the events.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.on = True
        self.thread: int | None = None
        """The one that trains; None before it has begun."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called once, when the script begins to train."""
        self.optimizer_steps = 0
        self._path = path
        self._rank = rank
        self._writer = EventWriter(None)
        self._tracker: StepTracker | None = None
        self._closing = threading.Lock()
        self._models: WeakKeyDictionary[DistributedDataParallel, BucketHook | None] = WeakKeyDictionary()
        """Models that are followed, each with the comm hook that it was given."""
        self._newest: Callable[[], DistributedDataParallel | None] = lambda: None
        """Reference to the model that was followed last."""
        self._relays: WeakKeyDictionary[DistributedDataParallel, HookRelay] = WeakKeyDictionary()
        """Models on a GPU with a comm hook of their own."""
        self._registering = False
        self._cycle = OptimizerCycle()
        self._stepping: Optimizer | None = None
        """The optimizer in whose step the script is."""
        self._in_backward = False
        self._ends_after_backward: Optimizer | None = None
        """The optimizer that has stepped within the backward pass and ended the iteration."""
        self._backwards = 0
        self._losses: list[Tensor | float] = []
        self._losses_before = 0
        """Number of losses before the last backward pass."""
        self._scaled: tuple[Any, Tensor, Tensor | None] | None = None
        """Reference to a loss that a GradScaler has scaled, the unscaled loss, and the scale."""
        self._batches = FetchedBatches()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def steps(self) -> int:
        return 0 if self._tracker is None else self._tracker.step

    def close(self, *, handed_over: bool = False, failed: bool = False) -> str:
        """Write the last steps and stop measuring; return why the end of the record is not on disk, empty if it is."""
        with self._closing:
            if self.on and not handed_over and not failed and not self.steps:
                self._report_unmeasured()
            self.on = False
            tracker, other_thread = self._tracker, self.thread != threading.get_ident()
            if tracker is not None and self._writer.enabled:
                if not failed and not other_thread:
                    tracker.check_last_step()
                tracker.write_checksum()
                tracker.meter.close(other_thread=other_thread)
            self._writer.close()
            return self._writer.write_error

    def _report_unmeasured(self) -> None:
        message = f"{self._unmeasured()}, so nothing of this training is measured"
        _print_line(message)
        self._open_record()
        self._writer.write(
            Finding(
                time=time.time(),
                kind="not_measured",
                severity="info",
                rank=self._rank,
                cause="no_steps",
                message=message,
                advice="processes that a script starts are measured if they join a process group of torch.distributed; "
                "set starts_ranks = true in [train] if a launcher in the script is to start the ranks, or call "
                "trainer.watch",
            )
        )

    def _open_record(self) -> None:
        if not self._writer.enabled:
            self._writer = EventWriter(self._path, rank=self._rank)

    def await_compiler(self) -> None:
        if self.on and self._tracker is None:
            self._open_record()
            self._writer.before_each_write(CompilationReport(self._writer, self._rank, lambda: self.on).check)

    def _unmeasured(self) -> str:
        if not self.optimizer_steps:
            return "no optimizer's step was seen"
        return "no call of backward() was seen (torch.autograd.grad is not measured)"

    def fail(self, error: Exception) -> None:
        if self.on:
            self.on = False
            _print_line(f"this training is no longer measured: {type(error).__name__}: {error}")

    def _forget(self) -> None:
        """Measure nothing in a forked process, such as a data loading process."""
        self.on = False
        self._tracker = None

    # ------------------------------------------------------------------------------------------ forward, backward

    @_guarded
    def begin_forward(self, model: DistributedDataParallel, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        if not _trains(model):
            if self._tracker is not None:
                self._tracker.mark_evaluation()
            return
        tracker = self._tracker
        if tracker is None:
            parameter = next(model.parameters(), None)
            tracker = self._begin(torch.device("cpu") if parameter is None else parameter.device)
        if self._newest() is not model and model not in self._models:
            self._follow(model, tracker)
        tracker.mark(self._open_phase(tracker), then="forward")
        tracker.epoch += self._batches.train()
        if len(self._models) == 1:
            first = arguments[0] if arguments and not named else None
            size = size_of(first if type(first) is Tensor else [named, arguments])
            tracker.samples, tracker.tokens = plus((tracker.samples, tracker.tokens), size)

    @_guarded
    def end_forward(self, model: DistributedDataParallel) -> None:
        # Without a mark: the loss is computed next, which is the same phase.
        if self._tracker is not None and self._tracker.open_phase == "forward" and _trains(model):
            self._tracker.forward_done = True
            self._tracker.synchronises |= bool(model.require_backward_grad_sync)

    @_guarded
    def begin_backward(self, outputs: Any) -> bool:
        """Return whether the backward pass is measured: one within another is not."""
        if self._in_backward:
            return False
        output = outputs if isinstance(outputs, Tensor) else next(iter(outputs), None)
        if not isinstance(output, Tensor):
            return False
        tracker = self._begin(output.device)
        tracker.mark(self._open_phase(tracker), then="backward", trained=True)
        tracker.epoch += self._batches.train()
        self._in_backward = True
        self._losses_before = len(self._losses)
        scaled, self._scaled = self._scaled, None
        if scaled is not None and scaled[0]() is output:
            output = scaled[1]
            if scaled[2] is not None:
                tracker.grad_scale = scaled[2]
        # Of other kinds of tensors, such as distributed ones, reading the number may take a collective.
        if type(output) is Tensor and output.numel() == 1 and output.is_floating_point():
            # Only on the host can the number be read without waiting for it.
            on_host = output.device.type == "cpu"
            self._losses.append(output.item() if on_host else output.detach().reshape(()).to(torch.float32, copy=True))
        return True

    @_guarded
    def end_backward(self, *, passed: bool = True) -> None:
        """Without ``passed`` it raised an exception."""
        self._in_backward = False
        if self._tracker is None:
            return
        if passed:
            self._backwards += 1
        else:
            del self._losses[self._losses_before :]
        self._tracker.mark("backward", then="optimizer")
        if self._ends_after_backward is not None:
            optimizer, self._ends_after_backward = self._ends_after_backward, None
            self._end(self._tracker, optimizer)

    @_guarded
    def scale(self, scaled: Any, loss: Any, scale: Any) -> None:
        if isinstance(scaled, Tensor) and isinstance(loss, Tensor):
            factor = scale.detach().clone() if isinstance(scale, Tensor) else None
            self._scaled = ref(scaled), loss.detach(), factor

    # ------------------------------------------------------------------------------------------ optimizer

    @_guarded
    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """Within an optimizer's step there may be forward and backward passes."""
        self.optimizer_steps += 1
        if self._stepping is not None and self._stepping is not optimizer:
            return  # the step of an optimizer within that of another
        self._stepping = optimizer
        tracker = self._tracker
        if tracker is None or self._in_backward:
            return
        tracker.stepping = True
        if tracker.evaluated or tracker.open_phase != "optimizer":
            tracker.mark(then="optimizer")

    @_guarded
    def end_optimizer(self, optimizer: Optimizer) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        if self._tracker is None:
            return
        self._tracker.stepping = False
        if not self._in_backward:
            self._tracker.mark("optimizer")
        if not self._backwards and not self._in_backward:
            return
        role = self._cycle.step(optimizer)
        if role == "ends" and self._in_backward:
            self._ends_after_backward = optimizer
        elif role == "ends":
            self._end(self._tracker, optimizer)
        elif role == "extends" and not self._in_backward:
            self._discard(self._tracker)

    @_guarded
    def skip_optimizer(self, optimizer: Optimizer) -> None:
        if self._tracker is not None and self._cycle.ends_with(optimizer):
            self._discard(self._tracker)

    # ------------------------------------------------------------------------------------------ data

    @_guarded
    def begin_data(self, iterator: Any) -> bool:
        """Return whether the wait for a batch of a DataLoader's iterator is measured."""
        tracker = self._tracker
        if tracker is None:
            return False
        if not torch.is_grad_enabled():
            tracker.mark_evaluation()
            return False
        if self._batches.were_evaluated(iterator):
            tracker.mark_evaluation()
        tracker.mark(self._open_phase(tracker), then="data")
        return True

    @_guarded
    def end_data(self, iterator: Any, batch: Any) -> None:
        if self._tracker is None:
            return
        self._tracker.mark("data", then="other" if self._models else "forward")
        self._batches.add(iterator, None if len(self._models) == 1 else batch)

    @_guarded
    def end_epoch(self, iterator: Any) -> None:
        if self._tracker is None:
            return
        if self._batches.end(iterator):
            self._tracker.mark_evaluation()
        self._tracker.mark("other")

    # ------------------------------------------------------------------------------------------ comm hooks

    def register_comm_hook(
        self, register: Callable[..., None], model: DistributedDataParallel, state: object, hook: CommHook
    ) -> None:
        """Register a comm hook of the script, as ``register`` would, with a measuring hook around it."""
        measuring_hook = self._models.get(model)
        hooks: list[Any] | None = getattr(model, "_comm_hooks", None)
        if hooks is None or hooks or self._registering:
            register(model, state, hook)
        elif measuring_hook is not None and measuring_hook.fault is None:
            check: Any = model._check_comm_hook
            check(hook)
            hooks.append((hook, state))
            measuring_hook.give_way(hook, state)
            if self._tracker is not None and model.device_type == "cpu":
                self._tracker.meter.read_log(model)
        elif self.on and model.device_type != "cpu":
            relay = HookRelay(hook)
            # With the name and the annotations of the script's hook, which DDP checks.
            register(model, state, functools.wraps(hook)(lambda state, bucket: relay(state, bucket)))
            hooks[-1] = (hook, state)
            self._relays[model] = relay
        else:
            register(model, state, hook)

    def _follow(self, model: DistributedDataParallel, tracker: StepTracker) -> None:
        relay = self._relays.get(model)
        hooks: list[Any] = model._comm_hooks
        # In these modes DDP does not reduce by a comm hook, or averages over the ranks that still have data.
        special = model._use_python_reducer or model._delay_all_reduce_all_params or model._join_config.enable
        own_hooks = len(hooks)
        self._registering = True
        try:
            self._newest = ref(model)
            self._models[model] = tracker.meter.follow(model, relay=relay, own_hook=bool(hooks) or special)
        finally:
            self._registering = False
            del hooks[own_hooks:]  # the measuring hook: the list is pickled with the model
        tracker.replicate(model if len(self._models) == 1 else None)

    # ------------------------------------------------------------------------------------------ steps

    def _begin(self, device: torch.device) -> StepTracker:
        # Laps after which a step without an end is dropped: a training whose optimizer is not seen must not fill
        # memory.
        max_laps = 100_000
        if self._tracker is None:
            self.thread = threading.get_ident()
            self.on_begin()
            self._open_record()
            self._tracker = StepTracker(self._writer, rank=self._rank, device=device)
            self._tracker.start()
        elif self._tracker.laps > max_laps:
            self._discard(self._tracker)
        return self._tracker

    def _open_phase(self, tracker: StepTracker) -> Phase:
        """Return the phase since the last mark; ``other`` after a backward pass, outside optimizer steps."""
        after_backward = tracker.open_phase == "optimizer" and self._stepping is None
        return "other" if after_backward else tracker.open_phase

    def _end(self, tracker: StepTracker, optimizer: Optimizer) -> None:
        numbers = [loss for loss in self._losses if isinstance(loss, float)]
        tensors = [
            loss for loss in self._losses if isinstance(loss, Tensor) and loss.device.type == tracker.device.type
        ]
        # No loss of the step if one of them is on another device: copying it would wait for that.
        if numbers and len(numbers) == len(self._losses):
            tracker.loss = sum(numbers)
        elif tensors and len(tensors) == len(self._losses):
            tracker.loss = tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum()
        if len(self._models) != 1:
            tracker.samples, tracker.tokens = self._batches.size
        tracker.end(optimizer)
        self._begin_step()

    def _discard(self, tracker: StepTracker) -> None:
        tracker.discard()
        self._begin_step()

    def _begin_step(self) -> None:
        self._backwards, self._losses, self._batches.size = 0, [], (0, None)


def _trains(model: DistributedDataParallel) -> bool:
    # The flag of the inner model: Lightning sets only that back after an evaluation.
    return model.module.training and torch.is_grad_enabled()


def _print_line(line: str) -> None:
    print(f"gputrain: {line}", file=sys.stderr)
