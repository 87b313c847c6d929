"""Check that a model with a batch norm gets no training batch of one sample, for which the norm raises."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.dataset import AnyDataset, SizedDataset, is_stream
from trainer.data.loader import BatchLoader
from trainer.data.shares import DEFAULT_BATCH_SIZE
from trainer.tasks.task import Task

_TOO_FEW = "more than 1 value per channel"
"""Part of torch's message where a batch norm gets one value per channel, whose variance is 0."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def require_batches_for_norms(
    task: Task, model: nn.Module, dataset: AnyDataset, options: Training, *, smallest: int
) -> None:
    """Try a batch of one sample if there will be one and the model has a batch norm; an image may have enough values.

    Args:
        task: gives batch and loss.
        model: on the CPU; not changed.
        dataset: the training data.
        options: batch sizes and loader processes.
        smallest: the fewest samples of a batch.

    Raises:
        RequestError: a batch of one sample cannot be trained on.
    """
    if smallest > 1 or is_stream(dataset) or not any(isinstance(module, _NORMS) for module in model.modules()):
        return
    dataset = cast(SizedDataset, dataset)
    reader = BatchLoader(dataset, task.collate, num_workers=min(options.num_workers, 1), pin_memory=False)
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.no_grad():
            task.loss(model, next(reader.read(range(1), [0], lambda _: (0, 1), seed=0)).batch)
    except ValueError as error:
        if _TOO_FEW not in str(error):
            raise
        if options.max_tokens:
            raise RequestError(
                "the model has a batch norm, which needs batches of at least 2 samples, but --max-tokens may make one "
                "of 1: give a --batch-size alone"
            ) from None
        if min(options.batch_size or (DEFAULT_BATCH_SIZE,)) == 1:
            raise RequestError("the model has a batch norm, which needs a --batch-size of at least 2") from None
        raise RequestError(
            f"the training data has {len(dataset)} samples, whose last batch is 1 sample on a rank, and the model's "
            "batch norm needs 2: leave it out with --drop-last, or choose another --batch-size"
        ) from None
    finally:
        reader.close()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
