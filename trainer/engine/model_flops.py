"""Count the floating-point operations that a model makes for a sample, forward and backward.

They are the model's own: what activation checkpointing computes again does not count, as the model FLOPs utilization
has it (Chowdhery et al., PaLM, appendix B). Where the figure cannot be right there is none.
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

MAX_SHAPES = 8
"""Shapes of a batch that are counted, each of which makes one micro-step slower; if these agree, others will."""
TOLERANCE = 0.01
"""By how much two counts may differ: a share of a peak is shown in percents."""
_KNOWN_OPERATORS = ("aten", "prims", "prim", "profiler", "c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of which the operators with many operations are known; another's kernels compute what nobody can tell."""
_FORMATS: Mapping[torch.dtype, NumberFormat] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls every operator as it is, and adds up the operations of those for which there is a formula.

    ``FlopCounterMode`` takes operators without one apart, which may change a result; here the training is the same
    with and without, and what cannot be counted ends the counting only.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.flops: dict[NumberFormat, int] = {}
        """By number format."""
        self.in_backward = False
        """Whether the forward pass is over: what records gradients from then on is computed a second time."""
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
            # One of higher order, of another library, of a tensor that is several, or a product without a formula.
            self.failed = (
                operator is None
                or func.namespace not in _KNOWN_OPERATORS
                or any(_dispatches(kind) for kind in types)
                or UNCOUNTED.search(func._schema.name.partition("::")[2]) is not None
            )
            return
        flops, tensor = formula(args, out)
        dense = all(arg.layout is torch.strided for arg in args if isinstance(arg, Tensor))
        found = number_format(tensor.dtype, self._capability, by_cudnn=operator in BY_CUDNN)
        elsewhere = tensor.device.type != self._device.type
        if found is None or not dense or elsewhere or any(_dispatches(kind) for kind in types):
            self.failed = True
        elif not (self.in_backward and torch.is_grad_enabled()):
            self.flops[found] = self.flops.get(found, 0) + flops


def _dispatches(kind: type) -> bool:
    """Whether a class of tensors computes its operators by others, which are not seen."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def number_format(
    dtype: torch.dtype, capability: tuple[int, int] | None, *, by_cudnn: bool = False
) -> NumberFormat | None:
    """Return the format in which products are made; None for one that is not known.

    Whether those of 32-bit floats are rounded to TF32 follows from the settings in force, which a task may change.

    Args:
        dtype: of the factors.
        capability: of the GPU, as (major, minor); None on a CPU.
        by_cudnn: whether cuDNN makes them, which has a setting of its own.
    """
    found = _FORMATS.get(dtype)
    if found != "fp32" or capability is None or capability < AMPERE:
        return found
    rounds = torch.backends.cudnn.allow_tf32 if by_cudnn else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else "fp32"


class FlopCount:
    """Counts micro-batches of this rank: the first shape of a batch twice, further ones once.

    Samples that take unequally many operations have no figure: then the one that was recorded is withdrawn.
    """

    def __init__(self, options: Training, ctx: WorkerContext) -> None:
        """Count where ``--count-flops`` asks for it and nothing is compiled."""
        on_gpu = ctx.device.type == "cuda"
        # Without a peak there is no share of one to show, so ``auto`` leaves CPUs alone.
        wanted = options.count_flops == "on" or (options.count_flops == "auto" and on_gpu)
        self._counts = wanted and ctx.writer.enabled and not options.compile
        self._ctx = ctx
        self._passes = 0
        """Micro-batches with samples so far, up to those counted."""
        self._shapes: set[Any] = set()
        self._counter: OperationCounter | None = None
        """While a micro-batch is counted."""
        self._written: record.ModelFlops | None = None

    def count(self, batch: Any, samples: int) -> AbstractContextManager[None]:
        """Return what a micro-batch's forward and backward pass run in."""
        if not self._counts or not samples:
            return nullcontext()
        shape = (samples, _shape(batch))
        if self._passes > 2 and shape in self._shapes:
            return nullcontext()
        self._passes += 1
        # While operators are counted torch.compile compiles nothing, neither then nor later: first it has its chance.
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
        if written is None and per_sample:
            self._write(self._event(flops, per_sample))
        elif written is not None and abs(per_sample - written.flops_per_sample) > TOLERANCE * written.flops_per_sample:
            self._write(structs.replace(written, time=time.time(), varies=True))
            self._counts = False
        if not per_sample or len(self._shapes) == MAX_SHAPES:
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
        multiprocessors: how many of them the process may use.
        flops: operations by number format, at least one.
    """
    peaks = {found: peak_flops_per_s(gpu, multiprocessors, found) for found in flops}
    seconds = [flops[found] / peak for found, peak in peaks.items() if peak is not None]
    return sum(flops.values()) / sum(seconds) if len(seconds) == len(peaks) else None


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def _shape(batch: Any) -> Any:
    """Return the shapes of a batch's tensors, in which it may be held as a member."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple(map(_shape, batch.values()))
    if isinstance(batch, list | tuple):
        return tuple(map(_shape, batch))
    members = getattr(batch, "__dict__", {}).values()
    return tuple(tuple(member.shape) for member in members if isinstance(member, Tensor))
