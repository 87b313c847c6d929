"""Data and model of a training: built alike on every rank, and checked before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainer import distributed
from trainer.contract.errors import RequestError, quoted
from trainer.contract.option_rules import patience_conflict, require_consistent, require_end
from trainer.contract.options import Training
from trainer.data.batches import EpochBatches, EvalBatches
from trainer.data.dataset import AnyDataset, SizedDataset, is_stream
from trainer.data.loader import BatchLoader
from trainer.data.seeds import seed_all
from trainer.data.shares import TokenLimit, rank_batch_sizes
from trainer.data.stream_batches import StreamBatches, StreamEvalBatches
from trainer.engine import reports, task_state
from trainer.engine.data_sample import DataSample, require_same_data
from trainer.engine.ddp_model import Replicated, Strategy, checkpoint_activations, keep_buffers, require_trainable
from trainer.engine.loss_check import SampleBatches, read_sample_batches
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task

_TOO_FEW = "more than 1 value per channel"
"""Part of torch's message where a batch norm gets one value per channel, whose variance is 0."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Data of the task on this rank."""

    splits: Mapping[str, AnyDataset]
    train: EpochBatches | StreamBatches
    evaluation: Mapping[str, EvalBatches | StreamEvalBatches]
    """Batches of the other splits."""
    samples: Mapping[str, DataSample]
    """Samples by split, which the ranks and a resumed training compare."""
    loss_check: SampleBatches


def read_splits(task: Task, options: Training, ctx: WorkerContext) -> Mapping[str, AnyDataset]:
    """Read the task's data."""
    seed_all(options.seed)  # so that a random split is the same on all ranks, and in an evaluation
    splits = task.datasets()
    _require_splits(f"{type(task).__name__}.datasets()", splits)
    reports.finding(ctx, "data_read", task.data_note())
    return splits


def _require_splits(source: str, splits: object) -> None:
    """Require datasets, and not their loaders, by the names of splits."""
    if not isinstance(splits, Mapping):
        raise RequestError(
            f"{source} returned a {type(splits).__name__}, but must return a dict of datasets: train and, if there are "
            "any, valid and test"
        )
    for split, dataset in splits.items():
        if split not in ("train", "valid", "test"):
            raise RequestError(f"{source} returned the split {quoted(split)}, but splits are train, valid and test")
        if isinstance(dataset, DataLoader):
            raise RequestError(
                f"{source} returned a DataLoader as {split}: return its dataset; --batch-size, --num-workers and the "
                "task's collate() make the batches"
            )


def read_data(task: Task, options: Training, ctx: WorkerContext) -> TrainingData:
    """Read the task's data, and make the batches of this rank; refuse options that do not fit."""
    require_consistent(options, task.options)
    require_end(options, task.options)
    splits = read_splits(task, options, ctx)
    if "train" not in splits:
        raise RequestError(f"the task has no training data; its splits are {', '.join(splits) or 'none'}")
    if options.patience and (unused := patience_conflict(options, has_data="valid" in splits)):
        raise RequestError(f"--patience {unused}")
    return TrainingData(
        splits=splits,
        train=training_batches(task, splits["train"], options, ctx),
        evaluation=evaluation_batches(task, splits, options, ctx),
        samples={
            split: DataSample(data, task.collate, num_workers=options.num_workers) for split, data in splits.items()
        },
        loss_check=read_sample_batches(task, splits, num_workers=options.num_workers),
    )


def build_model(task: Task, options: Training, data: TrainingData) -> nn.Module:
    """Build the task's model on the CPU; refuse one that cannot be trained with these options and this data."""
    seed_all(options.seed)  # the same initialisation on all ranks, whatever numbers reading the data drew
    model = task.model()
    require_trainable(model, options)
    require_batches_for_norms(task, model, data.splits["train"], options, smallest=data.train.smallest)
    if options.activation_checkpointing:
        checkpoint_activations(task, model)
    return model


def strategy_of(task: Task, model: nn.Module, options: Training, ctx: WorkerContext) -> Strategy:
    """Prepare a task's model for training, in the way of ``--strategy``."""
    if options.strategy == "ddp":
        return Replicated(model, options, ctx)
    from trainer.engine.sharded_model import FullySharded  # imports DTensor, which takes long

    return FullySharded(task, model, options, ctx)


def require_same_on_ranks(task: Task, samples: Mapping[str, DataSample], ctx: WorkerContext) -> None:
    """Wait until all ranks have data and model; require the same request, data and state of the task."""
    several = ctx.world_size > 1
    compared = {split: sample for split, sample in samples.items() if several and not sample.of_stream}
    for sample in compared.values():
        sample.state_dict()  # reads the samples, before the ranks wait for each other
    state = task_state.digest(task_state.state_of(task))
    ctx.before_wait()
    require_same_data(compared, {**ctx.request, "state of the task": state})


def require_batches_for_norms(
    task: Task, model: nn.Module, dataset: AnyDataset, options: Training, *, smallest: int
) -> None:
    """Try a batch of one sample if there will be one and the model has a batch norm; an image may do."""
    if smallest > 1 or is_stream(dataset) or not any(isinstance(module, _NORMS) for module in model.modules()):
        return
    dataset = cast(SizedDataset, dataset)
    reader = BatchLoader(dataset, task.collate, num_workers=min(options.num_workers, 1), pin_memory=False)
    try:
        with keep_buffers(model), torch.no_grad():
            task.loss(model, next(reader.read(range(1), [0], lambda _: (0, 1), seed=0)).batch)
    except ValueError as error:
        if _TOO_FEW not in str(error):
            raise
        if options.max_tokens:
            raise RequestError(
                "the model has a batch norm, which needs batches of at least 2 samples, but --max-tokens may make one "
                "of 1: give a --batch-size alone"
            ) from None
        if options.batch_size == "balanced":
            raise RequestError(
                "the model has a batch norm, which needs batches of at least 2 samples, but a share of --batch-size "
                "balanced may be 1: give a --batch-size of one value per rank"
            ) from None
        if isinstance(options.batch_size, tuple) and min(options.batch_size) == 1:
            raise RequestError("the model has a batch norm, which needs a --batch-size of at least 2") from None
        raise RequestError(
            f"the training data has {len(dataset)} samples, whose last batch is 1 sample on a rank, and the model's "
            "batch norm needs 2: leave it out with --drop-last, or choose another --batch-size"
        ) from None
    finally:
        reader.close()


def training_batches(
    task: Task, dataset: AnyDataset, options: Training, ctx: WorkerContext
) -> EpochBatches | StreamBatches:
    """Return the training batches of this rank; refuse options that do not fit the data or the number of ranks."""
    common: dict[str, Any] = {
        "collate": task.collate,
        "batch_sizes": rank_batch_sizes(options, ctx.world_size),
        "rank": ctx.rank,
        "seed": options.seed,
        "num_workers": options.num_workers,
        "pin_memory": ctx.device.type == "cuda",
        "drop_last": options.drop_last,
    }
    limit = token_limit(options)
    if not is_stream(dataset):
        lengths = sample_lengths(task, "train", dataset, limit)
        if limit is not None and lengths and options.batch_size == "balanced":
            limit = _balanced_limit(limit, lengths, options, ctx.world_size)
        return EpochBatches(
            cast(SizedDataset, dataset),
            shuffle=options.shuffle,
            lengths=lengths,
            limit=limit,
            curriculum=options.curriculum,
            fix_batches=options.fix_batches_to_gpus,
            balanced=options.batch_size == "balanced",
            **common,
        )
    for flag in ("max_tokens", "curriculum", "fix_batches_to_gpus"):
        if getattr(options, flag):
            raise RequestError(
                f"--{flag.replace('_', '-')} needs samples by index, but the training data is a stream, which is read "
                "in its own order: give the dataset __getitem__ and __len__, or leave the flag out"
            )
    if options.batch_size == "balanced":
        raise RequestError(
            "--batch-size balanced needs samples by index, but the training data is a stream, which each rank divides "
            "by itself: give the dataset __getitem__ and __len__, or a --batch-size of one value per rank"
        )
    warn = partial(reports.finding, ctx, "data_length", severity="warning")
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
    """Return this rank's batches of every split but ``train``."""
    limit = None if options.valid_batch_size else token_limit(options)
    largest = max(rank_batch_sizes(options, ctx.world_size))
    batches: dict[str, EvalBatches | StreamEvalBatches] = {}
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
            batches[split] = StreamEvalBatches(dataset, exchange=distributed.all_gather_list, **common)
        else:
            lengths = sample_lengths(task, split, dataset, limit)
            batches[split] = EvalBatches(cast(SizedDataset, dataset), lengths=lengths, limit=limit, **common)
    return batches


def token_limit(options: Training) -> TokenLimit | None:
    """Return the limits on a batch's tokens and samples; None without ``--max-tokens``."""
    if not options.max_tokens:
        return None
    most = options.batch_size[0] if isinstance(options.batch_size, tuple) else 0
    return TokenLimit(max_tokens=options.max_tokens, max_samples=most, multiple=options.required_batch_size_multiple)


def _balanced_limit(limit: TokenLimit, lengths: Sequence[int], options: Training, world_size: int) -> TokenLimit:
    """Return the limits of a batch of all ranks; each rank's part of it keeps to ``--max-tokens``."""
    limit.require_fit(lengths, "train")
    longest = max(lengths)
    low, high = world_size * longest, world_size * (options.max_tokens - longest)
    if not low <= options.global_batch_size <= high:
        # A part exceeds the rank's share by a sample at most.
        most = f" to {high}" if high >= low else f", and a --max-tokens of {2 * longest} or more"
        raise RequestError(
            f"--global-batch-size is {options.global_batch_size} tokens, but for {world_size} ranks with samples of up "
            f"to {longest} tokens and --max-tokens {options.max_tokens} it must be {low}{most}"
        )
    return replace(limit, max_tokens=options.global_batch_size)


def sample_lengths(task: Task, split: str, dataset: Any, limit: TokenLimit | None) -> Sequence[int] | None:
    """Return the length of each sample of a split, in tokens if there is a limit; None if lengths are not used."""
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
