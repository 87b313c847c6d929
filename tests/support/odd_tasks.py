"""User tasks with unusual but allowed behaviour, and one with wrong losses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn
from torch.utils.data import Subset, get_worker_info

from trainer.data.dataset import SizedDataset
from trainer.distributed import get_rank


class NormTask(TinyTask):
    """Task with a batch norm, whose statistics differ between ranks."""

    def model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 12))


class BadSampleTask(NormTask):
    """Task with one infinite sample."""

    def datasets(self) -> Mapping[str, SizedDataset]:
        splits = super().datasets()
        splits["train"].inputs[17] = float("inf")  # type: ignore[attr-defined]
        return splits


class SplitTask(TinyTask):
    """Task that splits its data at random, with Python's generator."""

    def datasets(self) -> Mapping[str, SizedDataset]:
        every = super().datasets()["train"]
        order = list(range(len(every)))
        random.shuffle(order)
        cut = self.options.valid_samples
        return {"train": Subset(every, order[cut:]), "valid": Subset(every, order[:cut])}  # type: ignore[arg-type]


class _Noisy:
    def __init__(self, dataset: SizedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self._dataset[index]
        return inputs + random.gauss(0.0, 0.5) + torch.randn(()), targets


class NoisyTask(SplitTask):
    """Task that augments its training data with random numbers of Python and torch."""

    def datasets(self) -> Mapping[str, SizedDataset]:
        splits = super().datasets()
        return {"train": _Noisy(splits["train"]), "valid": splits["valid"]}


class _MarkedSamples:
    """Dataset whose samples include whether a worker process has read them."""

    def __init__(self, dataset: SizedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return *self._dataset[index], get_worker_info() is not None


class ReaderTask(TinyTask):
    """Task with the share of samples read by worker processes as a metric."""

    def datasets(self) -> Mapping[str, SizedDataset]:
        return {split: _MarkedSamples(dataset) for split, dataset in super().datasets().items()}

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        *sample, in_worker = batch
        loss, count, _ = super().loss(model, sample)
        return loss, count, {"in_worker": in_worker.sum() * 3}


class TwoValueTask(TinyTask):
    """Task whose loss has no metrics."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)[:2]


class WrongTask(TinyTask):
    """Task that returns a wrong value as its loss, chosen by ``poison``."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss, count, metrics = super().loss(model, batch)
        given: dict[str, Any] = {
            "only the loss": loss,
            "four": (loss, count, metrics, None),
            "a number": (loss.item(), count, metrics),
            "unsummed": (loss.expand(3), count, metrics),
            "detached": (loss.detach(), count, metrics),
            "no count": (loss, None, metrics),
            "a list of metrics": (loss, count, [1.0]),
            "an unsummed metric": (loss, count, {"hits": torch.ones(2)}),
        }
        return given[self.options.poison]


__all__ = [
    "BadSampleTask",
    "NoisyTask",
    "NormTask",
    "ReaderTask",
    "SplitTask",
    "TinyOptions",
    "TwoValueTask",
    "WrongTask",
]


class StatedOptions(TinyOptions, kw_only=True):
    names: tuple[str, ...] = ("a", "b")
    """The names that stand for what a task has learnt from its data."""
    restores: bool = False
    odd: str = ""
    """A state that is refused: ``a set``, ``a list``, or one that differs ``by rank``."""


class StatedTask(TinyTask):
    """Task with a state, which it can restore or not."""

    Options = StatedOptions
    options: StatedOptions

    def __init__(self, options: StatedOptions) -> None:
        super().__init__(options)
        self.names = list(options.names)

    def state_dict(self) -> Any:
        names: Any = {"a set": set(self.names), "by rank": get_rank()}.get(self.options.odd, self.names)
        return [names] if self.options.odd == "a list" else {"names": names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.options.restores:
            self.names = list(state["names"])
