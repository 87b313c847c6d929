"""Order in which an epoch reads the samples: a function of seed and epoch, equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.data.loader import mix_seed
from trainer.data.shares import TokenLimit

POOL_BATCHES = 1000
"""Batches per pool; samples are sorted by length within a pool, as in PyText's pooling batcher."""


def epoch_order(samples: int, *, seed: int, lengths: Tensor | None = None, chunk: int = 0) -> Tensor:
    """Return the shuffled order in which an epoch reads the samples, ``[samples]``.

    With lengths, each chunk holds samples of similar length: the shuffled samples are sorted within pools of
    ``POOL_BATCHES`` chunks, and the chunks are shuffled. An incomplete chunk stays last, so that the others stay
    aligned with the batches.
    """
    generator = torch.Generator().manual_seed(seed)
    if lengths is None or not chunk:
        return torch.randperm(samples, generator=generator)
    order = _pooled(samples, lengths, POOL_BATCHES * chunk, generator)
    return _permuted(order, chunk, torch.randperm(samples // chunk, generator=generator))


def _pooled(samples: int, lengths: Tensor, pool: int, generator: torch.Generator) -> Tensor:
    """Return the samples shuffled, then sorted by length within pools of ``pool`` samples."""
    order = torch.randperm(samples, generator=generator)
    return torch.cat([each[torch.argsort(lengths[each], stable=True)] for each in torch.split(order, pool)])


def _permuted(order: Tensor, chunk: int, permutation: Tensor) -> Tensor:
    """Return the order with its whole chunks permuted; an incomplete chunk stays last."""
    whole = len(permutation) * chunk
    return torch.cat([order[:whole].view(len(permutation), chunk)[permutation].flatten(), order[whole:]])


def _within_ranks(batches: int, ranks: int, generator: torch.Generator) -> Tensor:
    """Return a permutation of batches that keeps each batch on its rank: its index modulo ``ranks`` is unchanged."""
    permutation = torch.arange(batches)
    for rank in range(min(ranks, batches)):
        own = permutation[rank::ranks]
        permutation[rank::ranks] = own[torch.randperm(len(own), generator=generator)]
    return permutation


@dataclass(frozen=True, kw_only=True)
class OrderPlan:
    """Parameters of the order of an epoch, besides its number and the data; a checkpoint keeps them as integers."""

    seed: int
    shuffle: bool
    chunk: int = 0
    """Samples of similar length that stay together; 0 ignores the lengths."""
    curriculum: int = 0
    """Number of first epochs that are not shuffled."""
    fixed_ranks: int = 0
    """Number of ranks that each keep their batches in every epoch; 0: batches change ranks."""
    fixed_batch: int = 0
    """Samples of a batch that a rank keeps; 0 if batches are made by tokens."""
    max_tokens: int = 0
    """Maximum tokens of a batch; 0: batches have a fixed number of samples."""
    max_samples: int = 0
    multiple: int = 1

    @classmethod
    def from_state(cls, state: Mapping[str, int]) -> OrderPlan:
        """Return the plan in a checkpoint's state; what is missing there, as in a stream's, has its default."""
        kept = {field.name: state[field.name] for field in fields(cls) if field.name in state}
        return cls(**{**kept, "shuffle": bool(state["shuffle"])})  # type: ignore[arg-type]

    @property
    def limit(self) -> TokenLimit | None:
        limit = TokenLimit(max_tokens=self.max_tokens, max_samples=self.max_samples, multiple=self.multiple)
        return limit if self.max_tokens else None

    def order(self, samples: int, epoch: int, lengths: Tensor | None) -> tuple[Tensor | range, list[int]]:
        """Return the order in which an epoch reads the samples, and the ends of its batches if made by tokens."""
        limit = self.limit
        if not self.shuffle or epoch <= self.curriculum:
            by_length = self.shuffle and lengths is not None
            order = torch.argsort(lengths, stable=True) if by_length else range(samples)  # type: ignore[arg-type]
            return order, [] if limit is None else limit.ends(sizes_in_order(lengths, order))
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))  # permutes the fixed batches of a rank
        seed = self.seed if self.fixed_ranks else self.seed + epoch
        if limit is None:
            order = epoch_order(samples, seed=seed, lengths=lengths, chunk=self.chunk)
            if self.fixed_ranks:
                permutation = _within_ranks(samples // self.fixed_batch, self.fixed_ranks, generator)
                order = _permuted(order, self.fixed_batch, permutation)
            return order, []
        assert lengths is not None, "batches by tokens need lengths"
        per_batch = max(1, int(self.max_tokens / max(float(lengths.float().mean()), 1.0)))
        base = torch.Generator().manual_seed(seed)
        order = _pooled(samples, lengths, min(POOL_BATCHES * per_batch, samples), base)
        ends = torch.tensor(limit.ends(sizes_in_order(lengths, order)))
        counts = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        batches = torch.split(order, counts.tolist())
        permutation = torch.randperm(len(batches), generator=base)
        if self.fixed_ranks:
            permutation = permutation[_within_ranks(len(batches), self.fixed_ranks, generator)]
        return torch.cat([batches[index] for index in permutation.tolist()]), counts[permutation].cumsum(0).tolist()


def sizes_in_order(lengths: Tensor | None, order: Tensor | range) -> list[int]:
    """Return the lengths of the samples, in the given order."""
    assert lengths is not None, "batches by tokens need lengths"
    sizes: list[int] = lengths[order if isinstance(order, Tensor) else torch.arange(len(order))].tolist()
    return sizes
