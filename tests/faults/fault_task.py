"""A task of a user's own, of which one rank or another becomes slow at chosen steps in a chosen part of the step."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.dataset import SizedDataset
from trainer.tasks.task import Task


class FaultOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    samples: int = 4096
    width: int = 512
    layers: int = 6
    faults: str = ""
    """``WHERE:WHO:FROM:UNTIL`` (forward, backward, data or optimizer; steps from 1, the last one excluded), with
    commas between several; empty for a balanced run. WHO is a rank, ``turns`` for one rank after the other, ``random``
    for one of them at random, or ``lengths`` for all of them, each for some time."""
    delay_ms: float = 30.0
    batch_norm: bool = False
    """Whether layers keep running means, which are buffers."""


class FaultTask(Task):
    """Layers of equal width: some tens of milliseconds of real arithmetic per step."""

    Options = FaultOptions
    count_per_sample = 1

    def __init__(self, options: FaultOptions) -> None:
        super().__init__(options)
        self.steps = 0
        self.faults = [
            (where, who, range(int(first), int(last)))
            for where, who, first, last in (fault.split(":") for fault in options.faults.split(",") if fault)
        ]

    def datasets(self) -> Mapping[str, SizedDataset]:
        return {"train": _FaultPoints(self)}

    def model(self) -> nn.Module:
        width = self.options.width
        norm = nn.BatchNorm1d if self.options.batch_norm else nn.Identity
        layers = [nn.Sequential(nn.Linear(width, width), norm(width), nn.Tanh()) for _ in range(self.options.layers)]
        return nn.Sequential(*layers, nn.Linear(width, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        inputs, targets = batch  # [batch, width], [batch, 1]
        self.wait("forward")
        outputs = model(inputs)
        outputs = _SlowBackward.apply(outputs, self)
        return (outputs - targets).square().sum(), len(inputs), {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _SlowStep(model.parameters(), self)

    def wait(self, where: str) -> None:
        """Hold this rank up at the phases and steps of the options."""
        for place, who, steps in self.faults:
            if where == place and self.steps + 1 in steps:
                time.sleep(self.share(who) * self.options.delay_ms / 1000)

    def share(self, who: str) -> float:
        """Share of the delay by which this rank is held up now."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if who == "lengths":
            return random.Random(self.steps * ranks + rank).expovariate(1.0)  # many are short and few are long
        turn = {"turns": self.steps % ranks, "random": random.Random(self.steps).randrange(ranks)}
        return float(rank == (turn[who] if who in turn else int(who)))


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, task: FaultTask) -> Tensor:
        ctx.task = task
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.task.wait("backward")
        return gradients[0], None


class _SlowStep(torch.optim.SGD):
    def __init__(self, parameters: Any, task: FaultTask) -> None:
        super().__init__(parameters, lr=1e-4)
        self.task = task

    def step(self, closure: Any = None) -> Any:
        self.task.wait("optimizer")
        done = super().step(closure)
        self.task.steps += 1
        return done


class _FaultPoints:
    def __init__(self, task: FaultTask) -> None:
        generator = torch.Generator().manual_seed(7)
        self.task = task
        self.inputs = torch.randn(task.options.samples, task.options.width, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True).tanh()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.task.wait("data")
        return [self[index] for index in indices]
