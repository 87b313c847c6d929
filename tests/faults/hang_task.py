"""A task of a user's own, one rank of which stops going on, or leaves, in a chosen place."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.dataset import SizedDataset
from trainer.tasks.task import Task

SAMPLES = 64
BATCH = 4


class HangOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    where: str = ""
    """``datasets``, ``model``, ``first`` (in the first step), ``valid`` or ``epoch`` (before the second epoch)."""
    rank: int = 1
    how: str = "sleep"
    """``sleep``, ``spin``, or ``once``: sleep, but not where a rank of this run has hung before."""


class HangTask(Task):
    """One small layer; a step takes a millisecond."""

    Options = HangOptions
    count_per_sample = 1
    check_loss = False  # it hangs where the options say, not before the training
    training = False
    """Whether a step has begun."""

    def datasets(self) -> Mapping[str, SizedDataset]:
        self.reach("datasets")
        return {"train": _HangPoints(self, "train"), "valid": _HangPoints(self, "valid")}

    def model(self) -> nn.Module:
        self.reach("model")
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        self.reach("first" if model.training else "valid")
        self.training |= model.training
        return model(batch).square().sum(), len(batch), {}

    def reach(self, where: str) -> None:
        """Hang at the place that the options name."""
        if where != self.options.where or dist.get_rank() != self.options.rank:
            return
        hangs = Path(os.environ["GPUTRAIN_RUN"], "hangs")
        if self.options.how == "once" and hangs.exists():
            return
        hangs.touch()
        while True:
            if self.options.how != "spin":
                time.sleep(600)


class _HangPoints:
    def __init__(self, task: HangTask, split: str) -> None:
        self.task, self.split = task, split
        self.read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if self.split == "train" and self.task.training:  # not where the ranks compare their data
            if self.read == SAMPLES // 2 - BATCH:  # two ranks share an epoch
                self.task.reach("epoch")
            self.read += 1
        return torch.full((4,), index / SAMPLES)
