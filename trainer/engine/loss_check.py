"""Check of a task's loss before the training: that it is a sum, and which metrics it has."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from trainer.contract.errors import RequestError, listed
from trainer.data.dataset import AnyDataset, SizedDataset, is_stream
from trainer.data.loader import BatchLoader
from trainer.data.seeds import keep_random_state, seed_all
from trainer.engine import reports
from trainer.engine.ddp_model import keep_buffers, to_device
from trainer.engine.evaluation import refuse_gradients
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task, summed_loss

_SEED = 0


@dataclass(kw_only=True)
class SampleBatches:
    """Batches for the check: of one sample, and of the same sample twice."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    problem: str = ""
    """Why they could not be read or computed; training raises the same error, if it has such a batch."""
    means: list[str] = field(default_factory=list)
    """Metrics that are the same for both, while the count doubles."""


def read_sample_batches(task: Task, splits: Mapping[str, AnyDataset], *, num_workers: int) -> SampleBatches:
    """Read the batches for ``check_loss``, before CUDA is in use."""
    sized = [splits[name] for name in ("valid", "test", "train") if name in splits and not is_stream(splits[name])]
    if not (task.check_loss and sized):
        return SampleBatches()
    dataset = cast(SizedDataset, sized[0])

    def collate(samples: Any) -> list[Any]:
        if not isinstance(samples, list):  # the dataset fetches a whole batch
            return [task.collate(samples)]
        # One sample read once, because reading may draw random numbers; copies, because a collate may change them.
        return [task.collate(copy.deepcopy(samples)), task.collate(copy.deepcopy(samples) + copy.deepcopy(samples))]

    batches = SampleBatches()
    reader = BatchLoader(dataset, collate, num_workers=min(num_workers, 1), pin_memory=False)
    try:
        with keep_random_state():
            for index in sorted({0, len(dataset) - 1}):
                order = torch.tensor([index, index])
                single, double = (each.batch for each in reader.read(order, [1, 2], lambda size: (0, size), seed=_SEED))
                batches.pairs.append((single[0], single[-1] if len(single) > 1 else double[-1]))
    except RequestError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's collate may take no single sample
        return SampleBatches(problem=_describe(error))
    finally:
        reader.close()
    return batches


def check_loss(
    task: Task, model: nn.Module, batches: SampleBatches, ctx: WorkerContext, *, autocast: AbstractContextManager[Any]
) -> tuple[str, ...] | None:
    """Compute the loss of one sample, and of the same sample twice, in evaluation mode.

    A mean over the batch is the same for both, while the count doubles. Random numbers, buffers and the model's mode
    are as before.

    Raises:
        RequestError: the loss is a mean, or is no loss, or the forward pass makes a parameter.
    """
    names = {name for name, _ in model.named_parameters()}
    training = model.training
    model.eval()
    metrics = None
    try:
        with keep_random_state(), keep_buffers(model), torch.no_grad():
            metrics = _compare(task, model, batches, ctx.device, autocast)
    except RequestError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        batches.problem = _describe(error)
    finally:
        model.train(training)
    require_same_parameters(model, names)
    if batches.problem:
        reports.finding(ctx, "loss_not_checked", f"the loss of one sample cannot be computed: {batches.problem}")
    if batches.means and type(task).metrics is Task.metrics:
        # Not refused: of a loss that compares the samples of a batch, a sum may be the same, too.
        text = (
            f"loss() seems to return the mean of {listed(batches.means)}: the same for one sample and for that sample "
            "twice, and the count divides it once more"
        )
        advice = "return sums over the batch (check_loss = False in the task leaves this check out)"
        reports.finding(ctx, "metric_is_mean", text, severity="warning", advice=advice)
    return metrics


def _compare(
    task: Task, model: nn.Module, batches: SampleBatches, device: torch.device, autocast: AbstractContextManager[Any]
) -> tuple[str, ...] | None:
    def loss(batch: Any) -> tuple[float, float, dict[str, float]]:
        seed_all(_SEED)
        with autocast, refuse_gradients(task):
            value, count, sums = summed_loss(task, model, to_device(batch, device))
        return float(value), float(count), {name: float(each) for name, each in sums.items()}

    metrics: tuple[str, ...] | None = None
    means: list[tuple[float, float]] = []
    equal: set[str] = set()
    unequal: set[str] = set()
    same = 0.01  # relative difference of losses that are taken as equal: bf16 has 8 bits
    for one, two in batches.pairs:
        single, count, sums = loss(one)
        double, double_count, double_sums = loss(two)
        for name, value in sums.items() if double_count > 1.5 * count else ():
            if value and math.isfinite(value):
                is_same = math.isclose(double_sums.get(name, 0.0), value, rel_tol=same)
                (equal if is_same else unequal).add(name)
        if metrics is None and count:
            try:
                metrics = tuple(task.metrics(sums, count))
            except ArithmeticError:  # such as a precision without positives
                metrics = None
        if single and count and math.isclose(double, single, rel_tol=same) and double_count > 1.5 * count:
            means.append((single, double_count))
    if means and len(means) == len(batches.pairs):
        value, count = means[0]
        raise RequestError(
            f"{type(task).__name__}.loss() returns a mean, but must return a sum: one sample has the loss {value:.4g}, "
            f'and so has the same sample twice, with the count {count:g}: take reduction="sum", or multiply by the '
            "count (check_loss = False in the task leaves this check out)"
        )
    batches.means = sorted(equal - unequal)
    return metrics


def require_same_parameters(model: nn.Module, names: set[str]) -> None:
    """Require that a forward pass has made no parameter, which the optimizer would not know."""
    made = [name for name, _ in model.named_parameters() if name not in names]
    if made:
        raise RequestError(
            f"the model makes {listed(made)} in its forward pass, where no optimizer knows it: make every parameter in "
            "__init__, or run a batch through the model in the task's model()"
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]
