"""Tasks whose numbers are computed a second time by hand, and tasks that a training cannot take as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from tiny_task import TinyTask
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from trainer.tasks.task import Task

SAMPLES = 24


class RegressionOptions(msgspec.Struct, kw_only=True):
    samples: int = SAMPLES
    fault: str = ""
    first: int = 8


class Regression(Task):
    """Linear regression in double precision; the fault is chosen by an option."""

    Options = RegressionOptions
    count_per_sample: int | None = 1

    def datasets(self) -> Mapping[str, Any]:
        inputs, targets = points(self.options.samples)
        return {"train": TensorDataset(inputs, targets), "valid": TensorDataset(inputs[:8], targets[:8])}

    def model(self) -> nn.Module:
        return nn.Linear(4, 1).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return (model(inputs)[:, 0] - targets).square().sum(), len(inputs), {}


def points(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) + 0.25


class WideRegression(Regression):
    """A network in single precision, whose gradients fill several small buckets."""

    def datasets(self) -> Mapping[str, Any]:
        return {"train": TensorDataset(*wide_points())}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))


def wide_points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(144, 40, generator=generator), torch.randn(144, generator=generator)


class MeanLoss(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return F.mse_loss(model(inputs)[:, 0], targets), len(inputs), {}


class MeanLossOfBatches(MeanLoss):
    """Mean loss that counts batches, which is consistent."""

    count_per_sample = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)[0], 1, {}


class UncheckedMeanLoss(MeanLoss):
    check_loss = False


class PoppingMeanLoss(MeanLoss):
    """Samples are dicts that ``collate`` empties."""

    def datasets(self) -> Mapping[str, Any]:
        return {"train": _Dicts(*points(self.options.samples))}

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([each.pop("x") for each in samples]), torch.stack([each.pop("y") for each in samples])


class _Dicts:
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.inputs[index], "y": self.targets[index]}


class NoisyMeanLoss(MeanLoss):
    """The data is augmented at random, and there is no validation."""

    def datasets(self) -> Mapping[str, Any]:
        return {"train": _Noisy(*points(self.options.samples))}


class _Noisy(_Dicts):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + torch.randn(4), self.targets[index]


class OnlyPairs(Regression):
    """A loss that cannot take one sample."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) < 2:
            raise ValueError("this loss compares samples")
        return super().loss(model, batch)


class WrongCount(Regression):
    """Ten items per sample by the loss, one by ``count_per_sample``; from the third step on with ``late``."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, count, sums = super().loss(model, batch)
        self.calls += model.training
        if self.options.fault != "late" or self.calls >= 3:
            count *= 10
        return total, torch.tensor(count) if self.options.fault == "tensor" else count, sums


class NormStream(Regression):
    """A batch norm, and a stream whose first part, that of rank 0, has ``first`` samples."""

    def datasets(self) -> Mapping[str, Any]:
        inputs, targets = points(self.options.samples)
        return {"train": _Parts(inputs, targets, self.options.first), "valid": TensorDataset(inputs[:8], targets[:8])}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


class _Parts(IterableDataset[Any]):
    def __init__(self, inputs: Tensor, targets: Tensor, first: int) -> None:
        self.inputs, self.targets, self.first = inputs, targets, first

    def __iter__(self) -> Any:
        return iter(zip(self.inputs, self.targets, strict=True))

    def shard(self, count: int, index: int) -> Any:
        cut = self.first
        part = slice(0, cut) if index == 0 else slice(cut, None)
        return _Parts(self.inputs[part], self.targets[part], self.first)


class SparseWords(Task):
    """Mean of word vectors, whose gradient is sparse, and a linear layer."""

    Options = RegressionOptions
    count_per_sample = 1

    def datasets(self) -> Mapping[str, Any]:
        words, targets = sentences(self.options.samples)
        return {"train": TensorDataset(words, targets)}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 6, sparse=True), nn.Flatten(), nn.Linear(30, 1)).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words, targets = batch
        return (model(words)[:, 0] - targets).square().sum(), len(words), {}


def sentences(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(7, (samples, 5), generator=generator)  # few words, so that each occurs several times
    return words, torch.randn(samples, generator=generator, dtype=torch.float64)


class LateParameter(Regression):
    """A bias that the first forward pass makes; with ``training``, only the first one of the training."""

    def model(self) -> nn.Module:
        return _LateBias(self.options.fault)


class _LateBias(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.linear = nn.Linear(4, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "late") and (self.training or self.when != "training"):
            self.late = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        logits: Tensor = self.linear(inputs) + (self.late if hasattr(self, "late") else 0.0)
        return logits


class Unused(Regression):
    """A second head that no step uses; with ``late``, one that only the first step uses, with ``zero``, times 0."""

    calls = 0

    def model(self) -> nn.Module:
        return _TwoHeads()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        self.calls += model.training
        both = self.options.fault == "zero" or (self.options.fault == "late" and self.calls <= 1)
        if self.options.fault == "zero":
            inputs = torch.cat([inputs, torch.zeros_like(inputs[:, :1])], dim=1)
        return (model(inputs, both)[:, 0] - targets).square().sum(), len(inputs), {}


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        scale = inputs[:, 4:] if inputs.shape[1] > 4 else 1.0
        inputs = inputs[:, :4]
        logits: Tensor = self.body(inputs) + self.pooler(inputs) * scale if both else self.body(inputs)
        return logits


class LazyTask(Regression):
    def model(self) -> nn.Module:
        return nn.LazyLinear(1).double()


class LbfgsTask(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())


class OwnOptimizer(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=0.02)


class InputGradient(Regression):
    """A penalty on the gradient with respect to the input; with ``enabled`` it can be computed in a validation."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs = batch[0].clone().requires_grad_()
        with torch.set_grad_enabled(torch.is_grad_enabled() or self.options.fault == "enabled"):
            (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        total, count, sums = super().loss(model, batch)
        return total + gradient.square().sum(), count, sums


class TwoMetrics(TinyTask):
    """Task with the metrics ``accuracy`` and ``error``."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, count, sums = super().loss(model, batch)
        return total, count, {**sums, "error": count - sums["accuracy"]}


class NanOptions(msgspec.Struct, kw_only=True):
    begin: int = 1
    """Validation, from 1, with the first result that is not finite; 0: none."""
    end: int = 1000
    """Validation with the last one."""
    metric: bool = False
    """Whether the accuracy is not finite, in place of the loss."""
    infinite: bool = False
    """Whether it is infinite, in place of NaN."""
    split: str = "valid"


class NanValidation(Task):
    """Regression, some of whose validations, or whose test, have no finite result."""

    Options = NanOptions
    count_per_sample = 1
    check_loss = False
    validations = 0

    def datasets(self) -> Mapping[str, Any]:
        inputs, targets = points(SAMPLES)
        marks = {"train": 0.0, "valid": 1.0, "test": 2.0}
        return {
            split: TensorDataset(inputs, targets, torch.full((SAMPLES,), mark, dtype=torch.float64))
            for split, mark in marks.items()
        }

    def model(self) -> nn.Module:
        return nn.Linear(4, 1).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets, marks = batch
        total = (model(inputs)[:, 0] - targets).square().sum()
        accuracy = torch.ones((), dtype=torch.float64) * len(inputs)
        if not model.training and bool((marks[0] == 2.0) == (self.options.split == "test")):
            self.validations += 1  # one batch per validation
            if self.options.begin <= self.validations <= self.options.end:
                factor = float("inf") if self.options.infinite else float("nan")
                if self.options.metric:
                    accuracy = accuracy * factor
                else:
                    total = total * factor
        return total, len(inputs), {"accuracy": accuracy}


NOISE_SAMPLES = 4096


def noisy_gradients() -> Tensor:
    """Return the gradient of each sample of ``KnownNoise``, ``[NOISE_SAMPLES, 6]``."""
    generator = torch.Generator().manual_seed(4)
    spread = torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0, 3.0], dtype=torch.float64)
    return 0.4 + spread * torch.randn(NOISE_SAMPLES, 6, generator=generator, dtype=torch.float64)


class KnownNoise(Task):
    """Task whose gradients are those of ``noisy_gradients``, whatever the parameters are."""

    count_per_sample = 1
    check_loss = False

    def datasets(self) -> Mapping[str, Any]:
        return {"train": TensorDataset(noisy_gradients())}

    def model(self) -> nn.Module:
        return nn.Linear(6, 1, bias=False).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        (inputs,) = batch
        return model(inputs).sum(), len(inputs), {}


class OwnGenerator(Regression):
    """Regression on points with noise from a generator of the dataset's own."""

    def datasets(self) -> Mapping[str, Any]:
        return {"train": _Noisy(*points(24))}


class _Noisy(TensorDataset):
    generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        return inputs + torch.randn(4, generator=self.generator, dtype=inputs.dtype), targets
