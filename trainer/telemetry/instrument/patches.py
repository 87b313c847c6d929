"""Wrappers around torch's functions, each of which calls the original.

If possible, a function is wrapped that returns before the script's own code runs, so that a traceback through the
script does not show the wrapper.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.compiler import is_compiling

from trainer.telemetry.collectives import interception
from trainer.telemetry.instrument.guarded import guarded
from trainer.telemetry.instrument.recording import Recording
from trainer.telemetry.torch_compile import leave_uncompiled

Wrap = Callable[[Recording, Callable[..., Any]], Callable[..., Any]]


def patch(path: Path, rank: int) -> Recording:
    """Wrap torch's functions to measure every training of this process, and return the recording."""
    recording = Recording(path, rank)
    for module, name, wrap in PATCHES:
        _patch(recording, module, name, wrap)
    interception.wrap_calls(recording.collectives)
    optimizer = importlib.import_module("torch.optim.optimizer")

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return None if is_compiling() else recording.begin_optimizer(optimizer, args, kwargs)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            recording.end_optimizer(optimizer)

    optimizer.register_optimizer_step_pre_hook(before_step)
    optimizer.register_optimizer_step_post_hook(after_step)
    # All guarded methods of Recording have the same code object, so that any one of them stands for all.
    for function in (before_step, after_step, Recording.begin_forward):
        leave_uncompiled(function, callees=True)
    return recording


def patch_later(recording: Recording) -> dict[str, Callable[[], None]]:
    """Return what is to be called once each of these modules of torch has been imported, which takes long."""
    later: dict[str, Callable[[], None]] = {}
    for module in {module for module, _, _ in LATER_PATCHES}:
        patches = [patch for patch in LATER_PATCHES if patch[0] == module]

        def apply(patches: list[tuple[str, str, Wrap]] = patches) -> None:
            for module, name, wrap in patches:
                _patch(recording, module, name, wrap)

        later[module] = apply
    return later


def _patch(recording: Recording, module: str, name: str, wrap: Wrap) -> None:
    """Replace a function of torch by its wrapper; print a line instead if it is absent or not torch's own."""
    try:
        *holder, name = name.split(".")
        owner: Any = importlib.import_module(module)
        for part in holder:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, name)  # of a base class, too: OptimizedModule.__call__ of torch 2.6
        if not inspect.isfunction(original) or original.__module__.partition(".")[0] != "torch":
            raise TypeError("it was replaced")
    except (ImportError, AttributeError, TypeError) as error:
        where = ".".join([module, *holder, name])
        reason = f"{type(error).__name__}: {error}"
        print(f"gputrain: {where} is not torch's own and is not measured: {reason}", file=sys.stderr)
        return
    wrapper = wrap(recording, original)
    functools.update_wrapper(wrapper, original)
    setattr(owner, name, wrapper)
    leave_uncompiled(wrapper, callees=False)


@guarded
def _note(_recording: Recording, note: Callable[..., object], *arguments: Any) -> None:
    """Call a method of a part of the recording, guarded as its own are."""
    note(*arguments)


# ------------------------------------------------------------------------------------------------------- the wrappers


def _pre_forward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if recording.on:
            recording.begin_forward(self, inputs, kwargs)
        return original(self, *inputs, **kwargs)

    return wrapper


def _post_forward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, output: Any) -> Any:
        output = original(self, output)
        if recording.on:
            recording.end_forward(self, output)
        return output

    return wrapper


def _register_comm_hook(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, state: object, hook: Any) -> None:
        recording.models.register_comm_hook(original, self, state, hook, on=recording.on)

    return wrapper


def _backward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        outputs = args[0] if args else kwargs.get("tensors")
        if is_compiling() or not recording.on or not recording.begin_backward(outputs):
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            recording.end_backward(passed=False)
            raise
        recording.end_backward()
        return result

    return wrapper


def _stage_backward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Pipelines of torch, whose zero-bubble schedules call ``torch.autograd.grad``, for inputs and for weights."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        measured = recording.on and self.has_backward
        if not measured or not recording.begin_backward(kwargs.get("loss"), self.device):
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            recording.end_backward(passed=False)
            raise
        recording.end_backward()
        return result

    return wrapper


def _new_optimizer(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> None:
        recording.await_training(args[0])
        original(*args, **kwargs)

    return wrapper


def _next(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any) -> Any:
        if not recording.on or not recording.begin_data(self):
            return original(self)
        try:
            batch = original(self)
        except StopIteration:
            recording.end_epoch(self)
            raise
        recording.end_data(self, batch)
        return batch

    return wrapper


def _scale(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if recording.on and scaled is not outputs:
            _note(recording, recording.losses.scale, scaled, outputs, getattr(self, "_scale", None))
        return scaled

    return wrapper


def _gradients(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling() and recording.on:
            recording.begin_gradients()
        return original(*args, **kwargs)

    return wrapper


def _scale_grads(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Pipelines of torch: backward is called on the loss of each micro-batch, and the gradients divided afterwards."""

    def wrapper(self: Any, grad_scale_factor: int) -> None:
        original(self, grad_scale_factor)
        if self.is_last:  # the stage that has the loss
            _note(recording, recording.losses.divide, grad_scale_factor)

    return wrapper


def _stage_loss(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Pipelines of torch: called after the forward pass of any stage on a micro-batch."""

    def wrapper(self: Any, stage: Any, output: Any, targets: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        if recording.on:
            recording.end_stage_forward(stage, targets, index)
        return original(self, stage, output, targets, index, *args, **kwargs)

    return wrapper


def _zero_grad(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_compiling() and recording.on:
            _note(recording, recording.batches.set_to_zero, self, recording.optimizer_steps)
        original(self, *args, **kwargs)

    return wrapper


def _scaler_step(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = recording.optimizer_steps
        result = original(self, optimizer, *args, **kwargs)
        if recording.on and recording.optimizer_steps == before:
            recording.skip_optimizer(optimizer)
        return result

    return wrapper


def _compile(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        compiled, model = original(*args, **kwargs), args[0] if args else kwargs.get("model")
        # Without one it is a decorator, which calls torch.compile; with TORCHDYNAMO_DISABLE=1 the model stays as it is.
        if model is not None and compiled is not model:
            recording.begin_compiling()
        return compiled

    return wrapper


def _compiled_call(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if is_compiling() or not recording.on or not recording.begin_compiled(self):
            return original(self, *inputs, **kwargs)
        output = original(self, *inputs, **kwargs)
        recording.end_forward(self, output)
        return output

    return wrapper


def _new_mesh(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _note(recording, recording.parallelism.note_mesh, self)

    return wrapper


# ------------------------------------------------------------------------------------------------ wrappers around FSDP


def _root_pre_forward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2: called for each sharded module, of which the first one in a forward pass is its root."""

    def wrapper(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        begins = recording.on and self._state_ctx.iter_forward_root is None
        if begins:
            recording.begin_forward(module, args, kwargs, self._device)
        given = original(self, module, args, kwargs)
        if begins:
            _note(recording, recording.parallelism.note_sharding, self)
        return given

    return wrapper


def _sharded_post_forward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, module: Any, inputs: Any, output: Any) -> Any:
        ends = recording.on and self._state_ctx.iter_forward_root is self
        output = original(self, module, inputs, output)
        if ends:
            recording.end_forward(module, output)
        return output

    # torch.compile calls it instead of tracing into it, as it does torch's own.
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper


def _flat_pre_forward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP1: called for each wrapped module; of the outermost one it is not known before its first call."""

    def wrapper(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if recording.on and state._is_root is not False:
            recording.begin_forward(module, args, kwargs, getattr(state, "compute_device", None))
        return original(state, module, args, kwargs)

    return wrapper


def _flat_post_forward(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(state: Any, handle: Any, reshard: Any, module: Any, inputs: Any, output: Any) -> Any:
        output = original(state, handle, reshard, module, inputs, output)
        if recording.on and state._is_root:
            recording.end_forward(module, output)
        return output

    return wrapper


DDP = "torch.nn.parallel.distributed"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
PIPELINE_STAGE = "torch.distributed.pipelining.stage"
CLIPPING = ("torch.nn.utils", "torch.nn.utils.clip_grad")
PATCHES: tuple[tuple[str, str, Wrap], ...] = (
    (DDP, "DistributedDataParallel._pre_forward", _pre_forward),
    (DDP, "DistributedDataParallel._post_forward", _post_forward),
    (DDP, "DistributedDataParallel.register_comm_hook", _register_comm_hook),
    ("torch", "compile", _compile),
    ("torch.optim.optimizer", "Optimizer.__init__", _new_optimizer),
    ("torch.optim.optimizer", "Optimizer.zero_grad", _zero_grad),
    ("torch.nn", "Module.zero_grad", _zero_grad),
    ("torch.autograd", "backward", _backward),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", _next),
    ("torch.amp.grad_scaler", "GradScaler.scale", _scale),
    ("torch.amp.grad_scaler", "GradScaler.unscale_", _gradients),
    ("torch.amp.grad_scaler", "GradScaler.step", _scaler_step),
    *((module, name, _gradients) for module in CLIPPING for name in ("clip_grad_norm_", "clip_grad_value_")),
)
LATER_PATCHES: tuple[tuple[str, str, Wrap], ...] = (
    ("torch._dynamo.eval_frame", "OptimizedModule.__call__", _compiled_call),
    (FSDP1, "FullyShardedDataParallel.clip_grad_norm_", _gradients),
    (FSDP1, "_root_pre_forward", _flat_pre_forward),
    (FSDP1, "_post_forward", _flat_post_forward),
    (FSDP2, "FSDPState._root_pre_forward", _root_pre_forward),
    (FSDP2, "FSDPState._post_forward", _sharded_post_forward),
    ("torch.distributed.device_mesh", "DeviceMesh.__init__", _new_mesh),
    (PIPELINE_STAGE, "_PipelineStageBase.backward_one_chunk", _stage_backward),
    (PIPELINE_STAGE, "_PipelineStageBase.backward_weight_one_chunk", _stage_backward),
    (PIPELINE_STAGE, "_PipelineStageBase.scale_grads", _scale_grads),
    ("torch.distributed.pipelining.schedules", "_PipelineSchedule._maybe_compute_loss", _stage_loss),
)
