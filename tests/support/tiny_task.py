"""User task that is small enough for thousands of steps per second, and fails on request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.dataset import SizedDataset
from trainer.distributed import get_rank
from trainer.tasks.task import Task


class TinyOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    samples: int = 50
    valid_samples: int = 13
    dropout: float = 0.0
    masked: bool = False
    """Mask a varying part of each sample, so that the count differs between batches."""
    double: bool = False
    poison: str = ""
    """Origin of a non-finite number: ``loss``, ``input``, ``gradient``, ``once`` (loss), ``gradient once``, ``norm``
    (of the gradients only) or ``half`` (in half precision only)."""
    fault_rank: int = -1
    fault_step: int = -1
    fault: str = ""
    """Fault at ``fault_rank`` and ``fault_step``: ``raise``, ``exit``, ``kill`` or ``memory``."""
    width: int = 16


class TinyTask(Task):
    Options = TinyOptions

    def __init__(self, options: TinyOptions) -> None:
        super().__init__(options)
        self.calls = 0
        if not options.masked:
            self.count_per_sample = 3

    def datasets(self) -> Mapping[str, SizedDataset]:
        return {"train": _Points(self.options.samples, 7), "valid": _Points(self.options.valid_samples, 8)}

    def model(self) -> nn.Module:
        width = self.options.width
        model = nn.Sequential(
            nn.Linear(8, width),
            nn.Tanh(),
            nn.Dropout(self.options.dropout),
            nn.Linear(width, 12),
            _Poison(self.options),
        )
        return model.double() if self.options.double else model

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        inputs, targets = batch  # [batch, 8], [batch, 3]
        if model.training:
            self.calls += 1
            self._fault()
        logits = model(inputs.double() if self.options.double else inputs).view(-1, 3, 4)
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [batch, 3]
        keep = (inputs[:, :3] > 0) if self.options.masked else torch.ones_like(each, dtype=torch.bool)
        hits = ((logits.argmax(-1) == targets) & keep).sum()
        return (each * keep).sum(), keep.sum(), {"accuracy": hits}

    def _fault(self) -> None:
        options = self.options
        if self.calls != options.fault_step or get_rank() != options.fault_rank:
            return
        match options.fault:
            case "raise":
                raise ArithmeticError("the answer is not 42")
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), 9)
            case "memory":
                torch.empty(1 << 60, dtype=torch.uint8)


class _Poison(nn.Module):
    """Layer that produces a non-finite number after three training steps."""

    def __init__(self, options: TinyOptions) -> None:
        super().__init__()
        self.kind = options.poison
        self.steps = 0

    def forward(self, logits: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps <= 3 or not self.training:
            return logits
        if self.kind == "loss":
            return logits * float("inf")
        if self.kind == "once":
            return logits * float("inf") if self.steps == 4 else logits
        if self.kind == "half":
            return F.linear(logits * 1e3, torch.eye(12) * 1e3)
        if self.kind == "norm":
            return logits * 1e25
        if self.kind == "gradient" or (self.kind == "gradient once" and self.steps == 4):
            # The square root of 0 is finite; its gradient is not.
            return logits + torch.sqrt((logits - logits.detach()).abs())
        return logits


class _Points:
    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, 8, generator=generator)
        self.targets = torch.randint(4, (samples, 3), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class TaskWithTest(TinyTask):
    """Task with a test split of a prime number of samples."""

    def datasets(self) -> Mapping[str, SizedDataset]:
        return {**super().datasets(), "test": _Points(31, 9)}


class OtherTask(TinyTask):
    """Task with another name."""


class OneSidedTask(TinyTask):
    """Task whose count is 0 on rank 1; the other ranks return it as a Python number."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        total, count, sums = super().loss(model, batch)
        if model.training and get_rank() == 1:
            return total * 0.0, 0, sums
        return total, int(count), sums


class JumpingCounts(TinyTask):
    """Task in which some batches have a million times the items and the loss sum; the mean loss is unchanged."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        total, count, sums = super().loss(model, batch)
        factor = 1e6 if model.training and self.calls % 4 >= 2 else 1.0
        return total * factor, count * factor, sums


class UncheckedTinyTask(TinyTask):
    """Task whose loss is not checked before the training."""

    check_loss = False
