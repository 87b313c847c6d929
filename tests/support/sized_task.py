"""Tasks whose samples have sizes, or whose model has blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiny_task import TinyTask
from torch import nn


class SizedTask(TinyTask):
    """Samples of 1 to 6 tokens, with the dataset's ``size(index)``."""

    def datasets(self) -> Any:
        splits = super().datasets()
        for dataset in splits.values():
            dataset.size = lambda index: 1 + index * 7 % 6  # type: ignore[attr-defined]
        return splits


class DeepTask(TinyTask):
    def model(self) -> nn.Module:
        block = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(self.options.dropout)) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 16), *block, nn.Linear(16, 12))

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return list(model)[1:-1]


class DeepNormTask(DeepTask):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 12))
