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

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            recording.begin_optimizer(optimizer)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            recording.end_optimizer(optimizer)

    optimizer.register_optimizer_step_pre_hook(before_step)
    optimizer.register_optimizer_step_post_hook(after_step)
    # All guarded methods of Recording have the same code object, so that any one of them stands for all.
    for function in (before_step, after_step, Recording.begin_forward):
        leave_uncompiled(function, callees=True)
    return recording


def _patch(recording: Recording, module: str, name: str, wrap: Wrap) -> None:
    """Replace a function of torch by its wrapper; print a line instead if it is absent or not torch's own."""
    try:
        *holder, name = name.split(".")
        owner: Any = importlib.import_module(module)
        for part in holder:
            owner = getattr(owner, part)
        original = owner.__dict__[name]
        if not inspect.isfunction(original) or not original.__module__.startswith("torch."):
            raise TypeError("it was replaced")
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        where = ".".join([module, *holder, name])
        reason = f"{type(error).__name__}: {error}"
        print(f"gputrain: {where} is not torch's own and is not measured: {reason}", file=sys.stderr)
        return
    wrapper = wrap(recording, original)
    functools.update_wrapper(wrapper, original)
    setattr(owner, name, wrapper)
    leave_uncompiled(wrapper, callees=False)


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
            recording.end_forward(self)
        return output

    return wrapper


def _register_comm_hook(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, state: object, hook: Any) -> None:
        recording.register_comm_hook(original, self, state, hook)

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
            recording.scale(scaled, outputs, getattr(self, "_scale", None))
        return scaled

    return wrapper


def _scaler_step(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = recording.optimizer_steps
        result = original(self, optimizer, *args, **kwargs)
        if recording.on and recording.optimizer_steps == before:
            recording.skip_optimizer(optimizer)
        return result

    return wrapper


DDP = "torch.nn.parallel.distributed"
PATCHES: tuple[tuple[str, str, Wrap], ...] = (
    (DDP, "DistributedDataParallel._pre_forward", _pre_forward),
    (DDP, "DistributedDataParallel._post_forward", _post_forward),
    (DDP, "DistributedDataParallel.register_comm_hook", _register_comm_hook),
    ("torch.autograd", "backward", _backward),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", _next),
    ("torch.amp.grad_scaler", "GradScaler.scale", _scale),
    ("torch.amp.grad_scaler", "GradScaler.step", _scaler_step),
)
