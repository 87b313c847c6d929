"""Tasks whose operations are counted exactly, approximately or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sized_task import DeepTask
from tiny_task import TinyTask
from torch import Tensor, nn
from torch.utils.data import default_collate


class PartlyCompiledTask(TinyTask):
    """Task that compiles a part of its model, with the number of compiled frames as a metric."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        return nn.Sequential(torch.compile(model[:2], backend="eager"), *model[2:])

    def metrics(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        from torch._dynamo.utils import counters

        return {"compiled": float(counters["frames"]["ok"])}


class PaddedTask(TinyTask):
    """Task whose batches are padded to their longest sample, so that their lengths differ."""

    def collate(self, samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        length = 1 + int(inputs.abs().sum() * 100) % 7
        return inputs[:, None].expand(-1, length, -1), targets  # [B, T, 8], [B, 3]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        inputs, targets = batch
        total, count, sums = super().loss(_Averaged(model), (inputs.contiguous(), targets))
        return total, count, sums


class _Averaged(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).mean(1)
        return logits


class SkippingTask(DeepTask):
    """Task that skips two of its three blocks in every second batch: batches of one shape need different operations."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        skips = model.training and self.calls % 2
        return super().loss(_Skipping(model) if skips else model, batch)


class _Skipping(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, inputs: Tensor) -> Tensor:
        assert isinstance(self.model, nn.Sequential)
        first, *blocks, last = self.model
        logits: Tensor = last(blocks[0](first(inputs)))
        return logits


__all__ = ["DeepTask", "PaddedTask", "PartlyCompiledTask", "SkippingTask"]
