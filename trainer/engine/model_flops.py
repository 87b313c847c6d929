"""Number of floating-point operations of a model per sample, forward and backward.

By the formulas of ``torch.utils.flop_counter``. Operations that activation checkpointing repeats do not count, as in
the definition of model FLOPs utilization (Chowdhery et al., PaLM, appendix B). If the number cannot be right, none is
reported.
"""

from __future__ import annotations

import re
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.contract import record
from trainer.contract.options import Training
from trainer.engine.accelerator import AMPERE
from trainer.engine.compilation import Compilation
from trainer.engine.worker_context import WorkerContext
from trainer.host.peak_flops import NumberFormat, peak_flops_per_s

_KNOWN_NAMESPACES = ("aten", "prims", "prim", "profiler", "c10d", "_c10d_functional", "c10d_functional", "fsdp")
"""Namespaces whose costly operators are all known here; the operations of other kernels cannot be counted."""
_PRODUCTS = re.compile(
    r"(mm|matmul|linear|rnn|attention|layer_fwd)(_(?!flatten)|$)|conv(\d|_|olution)|gemm|lstm_mps|"
    r"^(lstm|gru)(_cell)?$|einsum|tensordot|multi_dot"
)
"""Names of torch operators that compute products, or (composite ones, without gradients) call those that do."""
_FORMATS: Mapping[torch.dtype, NumberFormat] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@cache
def formulas() -> ChainMap[Any, Callable[..., int]]:
    """Return the formulas by operator: those of torch, and more with these.

    A backward pass takes twice as many operations as the forward pass. torch ignores the groups of a convolution there,
    and counts attention scores that are computed again.
    """
    from torch.utils.flop_counter import flop_registry  # imports Triton, where there is one

    aten = torch.ops.aten
    convolution = flop_registry[aten.convolution]
    attention = flop_registry[aten._scaled_dot_product_flash_attention]

    def convolution_backward(*args: Any, out_val: Any) -> int:
        gradient, inputs, weight, _, *settings, output_mask = args
        return int(sum(output_mask[:2]) * convolution(inputs, weight, None, *settings, out_val=gradient))

    def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(2 * attention(query, key, value))

    own: dict[Any, Callable[..., int]] = {
        aten.convolution_backward: convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._scaled_dot_product_flash_attention_backward: attention_backward,
        aten._scaled_dot_product_efficient_attention_backward: attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward: attention_backward,
    }
    return ChainMap(own, flop_registry)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that adds up the operations of all operators that have a formula.

    ``FlopCounterMode`` decomposes operators without a formula, which may change results, and counts nothing for those
    it does not know. Here every operator is called unchanged, and one that cannot be counted ends only the counting.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.flops: dict[NumberFormat, int] = {}
        self.in_backward = False
        """Whether the forward pass is over; operators that record gradients after it are repeated ones."""
        self.failed = False
        """Whether there was an operator whose operations are not known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.failed:
            try:
                self._add(func, types, args, kwargs, out)
            except Exception:  # noqa: BLE001 - the figure is then absent
                self.failed = True
        return out

    def _add(self, func: Any, types: Any, args: Any, kwargs: Any, out: Any) -> None:
        formula = formulas().get(getattr(func, "_overloadpacket", None))
        if formula is None:
            self.failed = (
                not isinstance(func, torch._ops.OpOverload)  # of higher order
                or func.namespace not in _KNOWN_NAMESPACES
                or any(map(_dispatches, types))
                or _PRODUCTS.search(func._schema.name.partition("::")[2]) is not None
            )
            return
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        number_format = format_of(tensors[0].dtype, self._capability, by_cudnn="convolution" in func._schema.name)
        if (
            number_format is None
            or any(tensor.layout is not torch.strided for tensor in tensors)
            or tensors[0].device.type != self._device.type
            or any(map(_dispatches, types))
        ):
            self.failed = True
        elif not (self.in_backward and torch.is_grad_enabled()):
            flops = formula(*args, **kwargs, out_val=out)
            self.flops[number_format] = self.flops.get(number_format, 0) + flops


def _dispatches(kind: type) -> bool:
    """Return whether a class of tensors dispatches its operators to others, which are not seen here."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def format_of(dtype: torch.dtype, capability: tuple[int, int] | None, *, by_cudnn: bool = False) -> NumberFormat | None:
    """Return the number format of products; None for an unknown one.

    Whether 32-bit floats are rounded to TF32 follows from torch's current settings, which a task may change; cuDNN has
    its own. A CPU has no compute capability.
    """
    known = _FORMATS.get(dtype)
    if known != "fp32" or capability is None or capability < AMPERE:
        return known
    rounds = torch.backends.cudnn.allow_tf32 if by_cudnn else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounds else "fp32"


class FlopCount:
    """Counter of a rank's operations per sample, in a micro-batch of each shape; in two of the first shape.

    If samples differ in their number of operations, the recorded number is withdrawn.

    With torch.compile ``compilation`` runs these batches once more without it, as compiled code has other operators.
    """

    def __init__(self, options: Training, ctx: WorkerContext, compilation: Compilation) -> None:
        on_gpu = ctx.device.type == "cuda"
        # A CPU has no known peak, and so no utilization to show: ``auto`` does not count there.
        wanted = options.count_flops == "on" or (options.count_flops == "auto" and on_gpu)
        self._counts = wanted and ctx.writer.enabled
        self._compilation = compilation
        self._ctx = ctx
        self._passes = 0
        """Micro-batches with samples so far, without those whose shape was counted before."""
        self._shapes: set[Any] = set()
        self._counter: OperationCounter | None = None
        self._written: record.ModelFlops | None = None

    def count(self, batch: Any, samples: int) -> AbstractContextManager[None]:
        if not self._counts or not samples:
            return nullcontext()
        shape = (samples, _shape(batch))
        if self._passes > 2 and shape in self._shapes:
            return nullcontext()
        self._passes += 1
        # A function that first runs while operators are counted is never compiled, so the first pass is not counted.
        if self._passes == 1:
            return nullcontext()
        if self._compilation.on:
            self._shapes.add(shape)
            try:
                with self._counted(samples):
                    self._compilation.run_uncompiled(batch, self.begin_backward)
            except Exception:  # noqa: BLE001 - such as too little memory: the figure is then absent
                self._counts = False
            return nullcontext()
        if _has_compiled():
            self._counts = False
            return nullcontext()
        self._shapes.add(shape)
        return self._counted(samples)

    def begin_backward(self) -> None:
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
        most = max(flops, key=flops.__getitem__)
        rank = self._ctx.rank
        event = record.ModelFlops(time=time.time(), rank=rank, flops_per_sample=per_sample, number_format=most)
        if self._ctx.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self._ctx.device)
            event.device_name = gpu.name
            event.peak_flops_per_s = peak_of_mixture(gpu.name, gpu.multi_processor_count, flops)
        return event

    def _write(self, event: record.ModelFlops) -> None:
        self._written = event
        self._ctx.writer.write(event)


def peak_of_mixture(gpu: str, multiprocessors: int, flops: Mapping[NumberFormat, int]) -> float | None:
    """Return the operations per second of a GPU that computes each number format at its peak; None if one is unknown.

    Of the GPU's ``multiprocessors`` the process may use so many; ``flops`` are operations by number format.
    """
    seconds = 0.0
    for number_format, operations in flops.items():
        peak = peak_flops_per_s(gpu, multiprocessors, number_format)
        if peak is None:
            return None
        seconds += operations / peak
    return sum(flops.values()) / seconds


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
