"""Count the floating-point operations of a training step once, by torch's formulas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainer.contract import record
from trainer.contract.options import Training
from trainer.engine.worker_context import WorkerContext
from trainer.host.peak_flops import NumberFormat, peak_flops_per_s


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls every operator as it is, and adds up those for which torch has a formula.

    ``FlopCounterMode`` takes operators without one apart, which may change a result; here the training is the same
    with and without, and a formula that fails ends the counting only.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None and not self.failed:
            try:
                self.flops += int(formula(*args, **named, out_val=out))
            except Exception:  # noqa: BLE001 - the figure is then absent
                self.failed = True
        return out


class FlopCount:
    """Counts the first micro-batch of rank 0, forward and backward, what is computed twice included.

    Args:
        options: ``--count-flops``, and what the model computes in.
        ctx: of this rank.
    """

    def __init__(self, options: Training, ctx: WorkerContext) -> None:
        on_gpu = ctx.device.type == "cuda"
        # Without a peak there is no share of one to show, so ``auto`` leaves CPUs alone.
        wanted = options.count_flops == "on" or (options.count_flops == "auto" and on_gpu)
        self._pending = wanted and ctx.rank == 0 and ctx.writer.enabled and not options.compile
        self._ctx = ctx
        self._format: NumberFormat = (
            options.precision if options.precision != "fp32" else "tf32" if ctx.tf32 else "fp32"
        )

    @contextmanager
    def count(self, samples: int) -> Iterator[None]:
        """Count what is computed within, the first time that there are samples."""
        if not self._pending or not samples:
            yield
            return
        self._pending = False
        counter = _Counter()
        with counter:
            yield
        if counter.failed or not counter.flops:
            return
        device = self._ctx.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._ctx.writer.write(
            record.ModelFlops(
                time=time.time(),
                flops_per_sample=counter.flops / samples,
                number_format=self._format,
                device_name=name,
                peak_flops_per_s=None
                if name is None
                else peak_flops_per_s(
                    name, torch.cuda.get_device_properties(device).multi_processor_count, self._format
                ),
            )
        )
