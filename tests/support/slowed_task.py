"""Regression whose ranks take as long as they are told: each sample costs time in the loss.

By default the time is a wait, as for a device that computes without taking a core, so that more ranks than cores and a
busy machine show the same; with ``work`` it is CPU time of the rank's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.distributed import get_rank
from trainer.tasks.task import Task


class SlowedOptions(msgspec.Struct, kw_only=True):
    samples: int = 4096
    sample_ms: str = "0.5,1.5"
    """Milliseconds per sample of each rank."""
    fixed_ms: float = 0.0
    """Milliseconds per batch."""
    noise: float = 0.0
    """Standard deviation of each batch's time, relative."""
    slow_from: int = 0
    slow_to: int = 0
    """Batches from which on, and up to which, rank 0 takes three times as long."""
    work: bool = False
    in_both: bool = False
    """Whether half of the time is spent in the backward pass, as a slower device would."""
    memory: str = ""
    """Most samples that the memory of each rank holds in a training batch; empty: any."""
    memory_from: int = 0
    """Batches before which memory holds more."""
    in_backward: bool = False
    """Whether memory runs out in the backward pass, between two layers, with the message of the host's allocator."""
    counts: bool = True
    """Whether the count per sample is known beforehand."""
    buffers: bool = False
    """Whether the model has a batch norm."""


class SlowedTask(Task):
    Options = SlowedOptions

    def __init__(self, options: SlowedOptions) -> None:
        super().__init__(options)
        self.count_per_sample = 1 if options.counts else None
        self.batches = 0

    def datasets(self) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(self.options.samples, 4, generator=generator, dtype=torch.float64)
        targets = inputs @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) + 0.25
        return {"train": TensorDataset(inputs, targets), "valid": TensorDataset(inputs[:37], targets[:37])}

    def sizes(self, split: str) -> Sequence[int]:
        return [1 + index * 7 % 6 for index in range(self.options.samples if split == "train" else 37)]

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
        if self.options.in_backward:
            layers.insert(2, _AtBackward(self.require_memory))
        if self.options.in_both:
            layers.append(_AtBackward(self._take_time))
        if self.options.buffers:
            layers.insert(1, nn.BatchNorm1d(8))
        return nn.Sequential(*layers).double()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        inputs, targets = batch  # [batch, 4], [batch]
        if model.training:
            if not self.options.in_backward:
                self.require_memory(len(inputs))
            self.batches += 1
            self._take_time(len(inputs))
        return (model(inputs)[:, 0] - targets).square().sum(), len(inputs), {}

    def require_memory(self, samples: int) -> None:
        options = self.options
        if not options.memory or self.batches < options.memory_from:
            return
        if samples > int(options.memory.split(",")[get_rank()]):
            if options.in_backward:
                raise RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory for {samples} samples")
            raise torch.OutOfMemoryError(f"no memory for {samples} samples")

    def _take_time(self, samples: int) -> None:
        """Spend the time of a batch, or half of it."""
        options = self.options
        ms = options.fixed_ms + float(options.sample_ms.split(",")[get_rank()]) * samples
        if get_rank() == 0 and options.slow_from <= self.batches < options.slow_to:
            ms *= 3
        ms *= (1 + options.noise * float(torch.randn(()))) / (2 if options.in_both else 1)
        if not options.work:
            time.sleep(max(ms, 0.0) / 1e3)
            return
        end = time.thread_time() + ms / 1e3
        while time.thread_time() < end:
            pass


class _AtBackward(nn.Module):
    """Calls a function with the number of samples in the backward pass."""

    def __init__(self, call: Callable[[int], None]) -> None:
        super().__init__()
        self._call = call

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._call(len(gradient)))
        return hidden * 1.0
