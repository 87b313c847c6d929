"""Tasks that only a GPU can show something with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.data.dataset import SizedDataset


class TooLargeTask(TinyTask):
    """Allocates more memory than any GPU has, at its third step."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        found = super().loss(model, batch)
        if self.calls == 3 and model.training:
            torch.empty(1 << 50, dtype=torch.uint8, device=batch[0].device)
        return found


class WideTask(TinyTask):
    """Four layers of the given width: small ones are bound by the host, large ones by the GPU."""

    def __init__(self, options: TinyOptions) -> None:
        super().__init__(options)
        self.count_per_sample = 1

    def datasets(self) -> Mapping[str, SizedDataset]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(4096, self.options.width, generator=generator)
        return {"train": TensorDataset(inputs, torch.arange(4096) % 10)}  # type: ignore[dict-item]

    def model(self) -> nn.Module:
        width = self.options.width
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets), {}
