"""Training loop written with torch alone: the baseline of the training loop's speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader


def endless(
    dataset: Any, collate: Callable[[list[Any]], Any], epoch: Callable[[int], list[list[int]]]
) -> Iterator[Any]:
    """Yield batches of consecutive epochs; ``epoch`` returns the indices of each batch of an epoch, from 1."""
    number = 1
    while True:
        yield from DataLoader(dataset, batch_sampler=epoch(number), collate_fn=collate)
        number += 1


class BareLoop:
    """Plain DDP loop without record, checks or output."""

    def __init__(
        self,
        net: nn.Module,
        build_optimizer: Callable[[Any], Optimizer],
        batches: Iterator[Any],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        clip_norm: float,
    ) -> None:
        alone = dist.get_world_size() == 1
        self.model: nn.Module = net if alone else DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(self.model.parameters())
        self.batches = batches
        self.loss = loss
        self.clip_norm = clip_norm

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = next(self.batches)
            self.optimizer.zero_grad()
            self.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
            if self.clip_norm:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
