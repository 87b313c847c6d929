"""Tasks with a repeated block, for models that are divided among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.tasks.task import Task


class BlockOptions(msgspec.Struct, kw_only=True):
    samples: int = 37
    double: bool = True
    per_sample: int = 1
    """0: the count of a loss is only known from it, and differs between samples."""
    bad_from: int = -1
    """First sample whose input is not a number; -1: none."""
    fault: str = ""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width + 3)
        self.outer = nn.Linear(width + 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, W]`` to ``[B, W]``."""
        changed: Tensor = self.outer(torch.tanh(self.inner(self.norm(x))))
        return x + changed


class Stack(nn.Module):
    """Blocks of an odd width, which no number of ranks divides; the weights of input and output are one parameter."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.last = nn.Linear(width, 5, bias=False)
        self.tied = nn.Linear(width, 5)
        self.tied.weight = self.last.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, 5]`` to ``[B, 5]``."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.seen += 1
        result: Tensor = self.last(x) + self.tied(x)
        return result


class BlockTask(Task):
    """Regression with a stack of blocks."""

    Options = BlockOptions

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options)
        self.count_per_sample = options.per_sample or None

    def datasets(self) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(3)
        dtype = torch.float64 if self.options.double else torch.float32
        inputs = torch.randn(self.options.samples, 5, generator=generator, dtype=dtype)
        targets = torch.sin(inputs.flip(1) * 2)
        if self.options.bad_from >= 0:
            inputs[self.options.bad_from :] = float("nan")
        held = TensorDataset(inputs[:11], targets[:11])
        return {"train": TensorDataset(inputs, targets), "valid": held, "test": held}

    def model(self) -> nn.Module:
        model = Stack()
        if self.options.fault == "scalar":
            model.scale = nn.Parameter(torch.tensor(1.0))
        if self.options.fault == "mixed":
            model.blocks[1].norm.bfloat16()
        if self.options.fault == "shared":
            model.blocks[0].outer.weight = model.blocks[1].outer.weight
        if self.options.fault == "sparse":
            model.words = nn.Embedding(4, 2, sparse=True)
        if self.options.fault == "unused":
            model.blocks[2].spare = nn.Linear(2, 2)
        return model.double() if self.options.double else model

    def shard_modules(self, model: nn.Module) -> Sequence[Any]:
        match self.options.fault:
            case "list":
                return [model.blocks]  # type: ignore[list-item]
            case "foreign":
                return [nn.Linear(1, 1)]
            case "number":
                return 3  # type: ignore[return-value]
            case "shared" | "unused":
                return list(model.blocks)  # type: ignore[arg-type]
        return ()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        each = (model(inputs) - targets).square().sum(dim=1)
        if self.options.per_sample:
            return each.sum(), len(inputs), {}
        items = 1 + (inputs[:, 0] > 0)  # [B], 1 or 2 items of a sample
        return (each * items).sum(), items.sum(), {}


class OneBlock(BlockTask):
    """A model without a repeated block."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).double()
