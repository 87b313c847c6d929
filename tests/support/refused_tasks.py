"""Tasks that a training refuses, or warns of, each for one mistake of its author."""

from __future__ import annotations

from typing import Any

import torch
from numeric_tasks import Regression
from torch import nn
from torch.utils.data import DataLoader


class DatasetAlone(Regression):
    def datasets(self) -> Any:
        return super().datasets()["train"]


class MisnamedSplit(Regression):
    def datasets(self) -> Any:
        data = super().datasets()
        return {"train": data["train"], "val": data["valid"]}


class LoaderAsSplit(Regression):
    def datasets(self) -> Any:
        return {"train": DataLoader(super().datasets()["train"], batch_size=4)}


class NoModule(Regression):
    def model(self) -> Any:
        return None


class ForeignOptimizer(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)


class TextAsMetric(Regression):
    def metrics(self, totals: Any, count: float) -> Any:
        return {"quality": "high"}


class Exiting(Regression):
    def datasets(self) -> Any:
        raise SystemExit(0)


class MeanAsMetric(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        errors = model(batch[0])[:, 0] - batch[1]
        return errors.square().sum(), len(errors), {"mae": errors.abs().mean(), "sum": errors.abs().sum()}


class MeanByHand(MeanAsMetric):
    def metrics(self, totals: Any, count: float) -> Any:
        return dict(totals)
