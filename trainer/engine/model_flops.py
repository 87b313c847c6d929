"""Number of floating-point operations of a model per sample, forward and backward.

Operations that activation checkpointing repeats do not count, as in the definition of model FLOPs utilization
(Chowdhery et al., PaLM, appendix B). If the number cannot be right, none is reported.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.contract import record
from trainer.contract.options import Training
from trainer.engine.accelerator import AMPERE
from trainer.engine.flop_formulas import BY_CUDNN, FORMULAS, UNCOUNTED
from trainer.engine.worker_context import WorkerContext
from trainer.host.peak_flops import NumberFormat, peak_flops_per_s

_KNOWN_NAMESPACES = ("aten", "prims", "prim", "profiler", "c10d", "_c10d_functional", "c10d_functional")
"""Namespaces whose costly operators are all known here; the operations of other kernels cannot be counted."""
_FORMATS: Mapping[torch.dtype, NumberFormat] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that adds up the operations of all operators that have a formula.

    ``FlopCounterMode`` decomposes operators without a formula, which may change results. Here every operator is called
    unchanged, and one that cannot be counted ends only the counting.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.flops: dict[NumberFormat, int] = {}
        """Operations by number format."""
        self.in_backward = False
        """Whether the forward pass is over; operators that record gradients after it are repeated ones."""
        self.failed = False
        """Whether there was an operator whose operations are not known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.failed:
            try:
                self._add(func, types, args, out)
            except Exception:  # noqa: BLE001 - the figure is then absent
                self.failed = True
        return out

    def _add(self, func: Any, types: Any, args: Any, out: Any) -> None:
        operator = getattr(func, "_overloadpacket", None)
        formula = FORMULAS.get(operator)
        if formula is None:
            # Of higher order, of another library, on a tensor subclass that dispatches, or a product without a formula.
            self.failed = (
                operator is None
                or func.namespace not in _KNOWN_NAMESPACES
                or any(_dispatches(kind) for kind in types)
                or UNCOUNTED.search(func._schema.name.partition("::")[2]) is not None
            )
            return
        flops, tensor = formula(args, out)
        dense = all(arg.layout is torch.strided for arg in args if isinstance(arg, Tensor))
        found = number_format(tensor.dtype, self._capability, by_cudnn=operator in BY_CUDNN)
        other_device = tensor.device.type != self._device.type
        if found is None or not dense or other_device or any(_dispatches(kind) for kind in types):
            self.failed = True
        elif not (self.in_backward and torch.is_grad_enabled()):
            self.flops[found] = self.flops.get(found, 0) + flops


def _dispatches(kind: type) -> bool:
    """Return whether a class of tensors dispatches its operators to others, which are not seen here."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def number_format(
    dtype: torch.dtype, capability: tuple[int, int] | None, *, by_cudnn: bool = False
) -> NumberFormat | None:
    """Return the number format of products; None for an unknown one.

    Whether 32-bit floats are rounded to TF32 follows from torch's current settings, which a task may change.

    Args:
        dtype: type of the factors.
        capability: compute capability of the GPU, as (major, minor); None on a CPU.
        by_cudnn: whether cuDNN computes them, which has its own setting for TF32.
    """
    found = _FORMATS.get(dtype)
    if found != "fp32" or capability is None or capability < AMPERE:
        return found
    rounds = torch.backends.cudnn.allow_tf32 if by_cudnn else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else "fp32"


class FlopCount:
    """Counter of a rank's operations per sample, in a micro-batch of each shape; in two of the first shape.

    If samples differ in their number of operations, the recorded number is withdrawn.
    """

    def __init__(self, options: Training, ctx: WorkerContext) -> None:
        """Count if ``--count-flops`` requires it, there is a record and nothing is compiled."""
        on_gpu = ctx.device.type == "cuda"
        # A CPU has no known peak, and so no utilization to show: ``auto`` does not count there.
        wanted = options.count_flops == "on" or (options.count_flops == "auto" and on_gpu)
        self._counts = wanted and ctx.writer.enabled and not options.compile
        self._ctx = ctx
        self._passes = 0
        """Micro-batches with samples so far, without those whose shape was counted before."""
        self._shapes: set[Any] = set()
        self._counter: OperationCounter | None = None
        """Counter of the current micro-batch; None if it is not counted."""
        self._written: record.ModelFlops | None = None

    def count(self, batch: Any, samples: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward pass."""
        if not self._counts or not samples:
            return nullcontext()
        shape = (samples, _shape(batch))
        if self._passes > 2 and shape in self._shapes:
            return nullcontext()
        self._passes += 1
        # A function that first runs while operators are counted is never compiled, so the first pass is not counted.
        if self._passes == 1:
            return nullcontext()
        if _has_compiled():
            self._counts = False
            return nullcontext()
        self._shapes.add(shape)
        return self._counted(samples)

    def begin_backward(self) -> None:
        """Mark the end of the forward pass, if it is counted."""
        if self._counter is not None:
            self._counter.in_backward = True

    @contextmanager
    def _counted(self, samples: int) -> Iterator[None]:
        self._counter = counter = OperationCounter(self._ctx.device)
        try:
            with counter:
                yield
        finally:
            self._counter = None
        self._note({} if counter.failed else counter.flops, samples)

    def _note(self, flops: Mapping[NumberFormat, int], samples: int) -> None:
        per_sample, written = sum(flops.values()) / samples, self._written
        tolerance = 0.01  # relative difference up to which two counts agree; utilization is shown in whole percents
        if written is None and per_sample:
            self._write(self._event(flops, per_sample))
        elif written is not None and abs(per_sample - written.flops_per_sample) > tolerance * written.flops_per_sample:
            self._write(structs.replace(written, time=time.time(), varies=True))
            self._counts = False
        # Maximum number of batch shapes to count, each of which slows one micro-step; if these agree, others will.
        max_shapes = 8
        if not per_sample or len(self._shapes) == max_shapes:
            self._counts = False

    def _event(self, flops: Mapping[NumberFormat, int], per_sample: float) -> record.ModelFlops:
        device = self._ctx.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return record.ModelFlops(
            time=time.time(),
            rank=self._ctx.rank,
            flops_per_sample=per_sample,
            number_format=max(flops, key=lambda found: flops[found]),
            device_name=name,
            peak_flops_per_s=None
            if name is None
            else peak_of_mixture(name, torch.cuda.get_device_properties(device).multi_processor_count, flops),
        )

    def _write(self, event: record.ModelFlops) -> None:
        self._written = event
        self._ctx.writer.write(event)


def peak_of_mixture(gpu: str, multiprocessors: int, flops: Mapping[NumberFormat, int]) -> float | None:
    """Return the operations per second of a GPU that computes each number format at its peak; None if one is unknown.

    Args:
        gpu: its name.
        multiprocessors: number of them that the process may use.
        flops: operations by number format, at least one.
    """
    peaks = {found: peak_flops_per_s(gpu, multiprocessors, found) for found in flops}
    seconds = [flops[found] / peak for found, peak in peaks.items() if peak is not None]
    return sum(flops.values()) / sum(seconds) if len(seconds) == len(peaks) else None


def _has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def _shape(batch: Any) -> Any:
    """Return the shapes of a batch's tensors, which an object may have as attributes."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple(map(_shape, batch.values()))
    if isinstance(batch, list | tuple):
        return tuple(map(_shape, batch))
    attributes = getattr(batch, "__dict__", {}).values()
    return tuple(tuple(value.shape) for value in attributes if isinstance(value, Tensor))
