"""Finds out how many tokens each sample has, for ``--max-tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.token_batches import TokenLimit
from trainer.tasks.task import Task


def token_limit(options: Training) -> TokenLimit | None:
    """Return what a batch may hold; None where batches are made by samples alone.

    Raises:
        RequestError: the options contradict each other.
    """
    if not options.max_tokens:
        if options.required_batch_size_multiple > 1:
            raise RequestError("--required-batch-size-multiple cuts the batches of --max-tokens: give that too")
        return None
    sizes = options.batch_size or (0,)
    if len(sizes) > 1:
        raise RequestError(
            f"--batch-size has {len(sizes)} values, but --max-tokens makes batches that any rank may get: give one, "
            "the most samples of a batch"
        )
    return TokenLimit(
        max_tokens=options.max_tokens, max_samples=sizes[0], multiple=options.required_batch_size_multiple
    )


def sample_lengths(task: Task, split: str, dataset: Any, limit: TokenLimit | None) -> Sequence[int] | None:
    """Return the length of each sample of a split, or with a limit its tokens; None where nothing depends on it.

    Raises:
        RequestError: neither the task nor the dataset tells the tokens.
    """
    if limit is None:
        return task.lengths(split)
    sizes = task.sizes(split)
    if sizes is None and (size := getattr(dataset, "size", None)) is not None and callable(size):
        sizes = [int(size(index)) for index in range(len(dataset))]
    if sizes is None:
        raise RequestError(
            f"--max-tokens needs the tokens of each sample of the {split} data: give {type(task).__name__} a "
            "sizes(split) that returns them, or its dataset a size(index)"
        )
    return sizes
