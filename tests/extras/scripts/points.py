"""Data and a model that are quick to train."""

from __future__ import annotations

import torch
from fault import FaultLayer
from torch import nn
from torch.utils.data import TensorDataset


def points(count: int) -> TensorDataset:
    """Return points and the mean of their squares."""
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, x.square().mean(dim=1, keepdim=True))


def net() -> nn.Module:
    """Return a model of three layers."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 384), nn.ReLU(), FaultLayer(), nn.Linear(384, 384), nn.ReLU(), nn.Dropout(0.1), nn.Linear(384, 1)
    )
