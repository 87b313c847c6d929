"""The ``Task`` interface, which a user's own task subclasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainer.contract.errors import RequestError
from trainer.data.dataset import (
    AnyDataset,
    SizedDataset as SizedDataset,  # users' tasks name it from here
)


class NoOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a task that has none."""


class Task:
    """A model, its data and its loss. Subclasses give at least ``model``, ``datasets`` and ``loss``."""

    Options: ClassVar[type[Any]] = NoOptions
    """A ``msgspec.Struct`` or dataclass; its fields become flags and the keys of a recipe's ``[task]`` table."""

    count_per_sample: int | None = None
    """Items that each sample adds to the count of ``loss``, if equal for all samples (1 for a classifier, the window's
    length for a language model). The global count is then known without a collective; with None it is summed over the
    ranks at each step. Each step compares it with the count of ``loss``."""

    check_loss: bool = True
    """Whether the loss of one sample is computed before the training, alone and twice in a batch, in evaluation mode:
    a mean in place of a sum is refused."""

    lower_is_better: Sequence[str] = ()
    """Metrics of which the lowest value is the best for ``--best-metric``, as of those with ``loss`` in their name."""

    loss_unit: str = ""
    """Unit of the loss: ``nats`` if it is a natural logarithm, such as a cross-entropy; empty: none."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def datasets(self) -> Mapping[str, AnyDataset]:
        """Return the datasets ``train`` and optionally ``valid``, ``test``; called on every rank, before ``model``.

        Samples by index, or a stream: an ``IterableDataset``, alike on all ranks, of which each gets its share.
        """
        raise TypeError(f"{type(self).__name__} has no datasets()")

    def model(self) -> nn.Module:
        """Return the model on the CPU; the random seed is the same on all ranks."""
        raise TypeError(f"{type(self).__name__} has no model()")

    def collate(self, samples: list[Any]) -> Any:
        """Turn a list of samples into a batch: a tensor, or tuples, lists and dicts of tensors."""
        return default_collate(samples)

    def loss(
        self, model: nn.Module, batch: Any
    ) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]] | tuple[Tensor, Tensor | int]:
        """Return the summed loss, the number of items in the sum, and, if there are metrics, their sums.

        A metric is reported as its sum over the same count: the number of correct labels becomes the accuracy.
        """
        raise TypeError(f"{type(self).__name__} has no loss()")

    def state_dict(self) -> Mapping[str, Any]:
        """Return what the task has learnt from its data, such as vocabulary and labels; empty without any.

        It is saved in checkpoints: tensors, numbers, strings, and lists, tuples and dicts of them, alike on all ranks.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the training whose weights are used; called before ``datasets``, which then uses it."""

    def data_note(self) -> str:
        """Return in one line how the data was read, for the user and the record; empty if that is plain."""
        return ""

    def lengths(self, split: str) -> Sequence[int] | None:
        """Return the length of each sample, to batch samples of similar length; None for no grouping."""
        return None

    def sizes(self, split: str) -> Sequence[int] | None:
        """Return the tokens of each sample, for ``--max-tokens``; None to use the dataset's ``size(index)``."""
        return self.lengths(split)

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that ``--activation-checkpointing`` recomputes in the backward pass; none in another."""
        return ()

    def shard_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules by which ``--strategy fsdp`` divides the model; none for its largest repeated block.

        Only one of them is whole on a rank at a time, besides what is in none of them.
        """
        return ()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return the task's own optimizer; None for that of the options."""
        return None

    def parameter_groups(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Return groups of parameters with settings of their own; parameters in no group have those of the options.

        A group is a dict of ``params`` and any of ``lr_scale``, a factor of the learning rate; ``weight_decay``; and
        ``muon``: False keeps ``--optimizer muon`` from training its matrices, such as those of an output layer.
        """
        return ()

    def sparse_parameters(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """Return the parameters with few nonzero rows in their gradient, such as a large embedding.

        CPU ranks then compute and send only those rows; the result is the same.
        """
        return ()

    def metrics(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Turn sums over a whole split into the metrics of a validation."""
        return {name: total / count for name, total in totals.items()}

    def predict(self, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return a prediction for each input, as dicts of JSON's types; for ``gputrain predict``.

        Called without ``datasets``: what the task knows of its data comes from ``load_state_dict``. A row has the
        columns of a JSON object, or ``text``, a line; ``row[column]`` refuses a row that lacks one. The model is in
        evaluation mode, without gradients, on the GPU if there is one.
        """
        raise TypeError(f"{type(self).__name__} has no predict()")

    def read_inputs(self, path: Path) -> Iterable[Mapping[str, Any]] | None:
        """Return the inputs in a file of a format of the task's own, for ``predict``; None to read lines."""
        return None

    def sample(self, model: nn.Module) -> str | None:
        """Return a sample of the model's output as text, or None; called on rank 0."""
        return None


def summed_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
    """Return summed loss, count and metrics from the task's ``loss``; metrics are empty if it has none.

    Raises:
        RequestError: ``loss`` returns something else; one line that names the task's class.
    """
    result = task.loss(model, batch)
    if not isinstance(result, (tuple, list)):  # here and below no ``|``: each would create a type at every step
        _refuse(task, f"a {type(result).__name__}")
    if len(result) not in (2, 3):
        _refuse(task, f"a {type(result).__name__} of {len(result)}")
    loss, count, *rest = result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        _refuse(task, f"{_kind(loss)} as the loss")
    if torch.is_grad_enabled() and not loss.requires_grad:
        _refuse(task, "a loss that was not computed from the model's parameters")
    if (isinstance(count, Tensor) and count.numel() != 1) or not isinstance(count, (Tensor, int, float)):
        _refuse(task, f"{_kind(count)} as the count")
    if not rest:
        return loss, count, {}
    metrics = rest[0]
    if not isinstance(metrics, Mapping):
        _refuse(task, f"{_kind(metrics)} as the metrics")
    for name, value in metrics.items():
        if (isinstance(value, Tensor) and value.numel() != 1) or not isinstance(value, Tensor | int | float):
            _refuse(task, f"{_kind(value)} as the metric {name!r}")
    return loss, count, metrics


def _refuse(task: Task, returned: str) -> NoReturn:
    raise RequestError(
        f"{type(task).__name__}.loss() returned {returned}; it must return the summed loss (a tensor of one number), "
        "the count (a number or a tensor of one) and, if there are metrics, a dict of their sums"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"
