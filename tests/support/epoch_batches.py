"""Batches of a rank over numbers as samples, and the samples read from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from trainer.data.batches import EpochBatches
from trainer.data.loader import MicroBatch


def batches(samples: int | Sequence[Any], batch_sizes: Sequence[int], rank: int, **options: Any) -> EpochBatches:
    dataset = range(samples) if isinstance(samples, int) else samples
    settings: dict[str, Any] = {"collate": list, "seed": 1, "shuffle": True} | options
    return EpochBatches(dataset, batch_sizes=batch_sizes, rank=rank, **settings)  # type: ignore[arg-type]


def read(source: EpochBatches, update_freq: int, updates: int | None = None) -> list[list[MicroBatch]]:
    return [list(update) for update in itertools.islice(source.updates(update_freq), updates)]


def samples_of(updates: list[list[MicroBatch]]) -> list[Any]:
    return [sample for update in updates for micro in update if micro.samples for sample in micro.batch]
