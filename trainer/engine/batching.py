"""Batches of training and evaluation, built from the options and the task's datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from trainer import distributed
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.batches import EpochBatches, EvalBatches
from trainer.data.dataset import AnyDataset, SizedDataset, is_stream
from trainer.data.shares import TokenLimit, rank_batch_sizes
from trainer.data.stream_batches import StreamBatches, StreamEvalBatches
from trainer.engine import reports
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task


def batch_sizes(options: Training, world_size: int) -> tuple[int, ...]:
    """Return the samples per micro-step of each rank; the default with ``--max-tokens``, where they vary."""
    return rank_batch_sizes(None if options.max_tokens else options.batch_size, world_size)


def training_batches(
    task: Task, dataset: AnyDataset, options: Training, ctx: WorkerContext
) -> EpochBatches | StreamBatches:
    """Return the training batches of this rank.

    Raises:
        RequestError: the options do not fit the data or the number of ranks.
    """
    common: dict[str, Any] = {
        "collate": task.collate,
        "batch_sizes": batch_sizes(options, ctx.world_size),
        "rank": ctx.rank,
        "seed": options.seed,
        "num_workers": options.num_workers,
        "pin_memory": ctx.device.type == "cuda",
        "drop_last": options.drop_last,
    }
    limit = token_limit(options)
    if not is_stream(dataset):
        return EpochBatches(
            cast(SizedDataset, dataset),
            shuffle=options.shuffle,
            lengths=sample_lengths(task, "train", dataset, limit),
            limit=limit,
            curriculum=options.curriculum,
            fix_batches=options.fix_batches_to_gpus,
            **common,
        )
    for flag in ("max_tokens", "curriculum", "fix_batches_to_gpus"):
        if getattr(options, flag):
            raise RequestError(
                f"--{flag.replace('_', '-')} needs samples by index, but the training data is a stream, which is read "
                "in its own order: give the dataset __getitem__ and __len__, or leave the flag out"
            )
    warn = partial(reports.remark, ctx, "data_length", severity="warning")
    batches = StreamBatches(dataset, exchange=distributed.all_gather_list, warn=warn, **common)
    if batches.length is None and not (options.max_updates or options.stop_time):
        raise RequestError(
            "the training data is a stream without a length, whose epochs may never end: set --max-updates or "
            "--stop-time, or give the dataset a __len__"
        )
    return batches


def evaluation_batches(
    task: Task, splits: Mapping[str, AnyDataset], options: Training, ctx: WorkerContext
) -> dict[str, EvalBatches | StreamEvalBatches]:
    """Return this rank's batches of every split but ``train``.

    Raises:
        RequestError: a split is empty, or the tokens of its samples are not known.
    """
    limit = None if options.valid_batch_size else token_limit(options)
    largest = max(batch_sizes(options, ctx.world_size))
    found: dict[str, EvalBatches | StreamEvalBatches] = {}
    for split, dataset in splits.items():
        if split == "train":
            continue
        common: dict[str, Any] = {
            "collate": task.collate,
            "batch_sizes": (options.valid_batch_size or largest,) * ctx.world_size,
            "rank": ctx.rank,
            "split": split,
            "num_workers": options.num_workers,
            "pin_memory": ctx.device.type == "cuda",
        }
        if is_stream(dataset):
            found[split] = StreamEvalBatches(dataset, exchange=distributed.all_gather_list, **common)
        else:
            lengths = sample_lengths(task, split, dataset, limit)
            found[split] = EvalBatches(cast(SizedDataset, dataset), lengths=lengths, limit=limit, **common)
    return found


def token_limit(options: Training) -> TokenLimit | None:
    """Return the limits on a batch's tokens and samples; None without ``--max-tokens``."""
    if not options.max_tokens:
        return None
    (most,) = options.batch_size or (0,)
    return TokenLimit(max_tokens=options.max_tokens, max_samples=most, multiple=options.required_batch_size_multiple)


def sample_lengths(task: Task, split: str, dataset: Any, limit: TokenLimit | None) -> Sequence[int] | None:
    """Return the length of each sample of a split, in tokens if there is a limit; None if lengths are not used.

    Raises:
        RequestError: neither the task nor the dataset gives the tokens.
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
