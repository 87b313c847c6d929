"""A task one of whose loader workers hangs in the user's code."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.tasks.task import Task


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        if index == 50:
            read_from_dead_server()
        return torch.ones(4)


def read_from_dead_server() -> None:
    silent, _ = os.pipe()
    os.read(silent, 1)


class HangingTask(Task):
    count_per_sample = 1

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def datasets(self) -> dict[str, Dataset[Any]]:
        return {"train": Points()}

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch), torch.zeros(len(batch), 1), reduction="sum"), len(batch)
