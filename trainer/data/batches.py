"""Batches of a rank from data with samples by index: order, shares and updates of an epoch, and resuming within it.

The order is a function of seed and epoch, equal on all ranks. A micro-step takes the next ``sum(batch_sizes)`` samples
of the order, and each rank reads its slice of them; with equal batch sizes rank r reads batches r, r + W, r + 2W, ...
The position is the number of samples that all ranks together have consumed, so it is valid for any world size. No
sample is dropped or repeated: the last slices are shorter, and a rank with an empty slice gets a dummy batch whose loss
has weight zero. With ``--max-tokens`` a micro-step takes the next batch for each rank instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.errors import RequestError
from trainer.data.dataset import SizedDataset
from trainer.data.epoch_order import OrderPlan, sizes_in_order
from trainer.data.loader import BatchLoader, Collate, MicroBatch, mix_seed
from trainer.data.shares import MicroSteps, Shares, TokenLimit, shared_micro_steps, token_micro_steps


class Position(NamedTuple):
    """Position of the training in its data; valid for every world size."""

    epoch: int
    """Epoch, from 1."""
    consumed: int
    """Samples of the epoch that all ranks together have read."""


@dataclass(slots=True)
class Update:
    """Micro-steps of one optimizer step; iterating it reads this rank's batches one by one, once."""

    micro_steps: int
    """Number of micro-steps, the same on all ranks; below the update frequency only at the end of an epoch."""
    global_samples: int
    consumed: int
    batches: Iterator[MicroBatch]
    data_rank: int = 0
    """The lowest rank with samples in the most micro-steps; with samples by index it is rank 0, which has the first."""

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.batches


class EpochBatches:
    """Training batches of one rank over all epochs, with a position that a checkpoint keeps."""

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        collate: Collate,
        batch_sizes: Sequence[int],
        rank: int,
        seed: int,
        shuffle: bool,
        num_workers: int = 0,
        lengths: Sequence[int] | None = None,
        limit: TokenLimit | None = None,
        curriculum: int = 0,
        fix_batches: bool = False,
        pin_memory: bool = False,
        drop_last: bool = False,
        balanced: bool = False,
    ) -> None:
        """Start at epoch 1.

        Epoch e is shuffled with ``seed`` + e on all ranks, but for the first ``curriculum`` epochs, in which the
        shortest samples come first if there are ``lengths``; otherwise these put samples of similar length into a
        batch. With a ``limit`` batches are made by tokens, and of ``batch_sizes`` (samples per micro-step of each rank)
        only the number counts. ``fix_batches``: every rank has the same batches in every epoch, in another order.
        ``drop_last`` leaves out the samples at an epoch's end that do not fill the batch of every rank. ``balanced``
        batch sizes change within an epoch, whose order does not depend on them; with a ``limit``, that of a batch of
        all ranks, they are tokens.

        Raises:
            RequestError: too few samples to give every rank a batch, or not one length per sample.
        """
        self.samples = len(dataset)
        """Samples of an epoch."""
        self._shares = Shares(tuple(batch_sizes), rank, drop_last)
        self._balanced = balanced
        if self.samples == 0:
            raise RequestError("the training data is empty")
        self._lengths = None if lengths is None else _checked_lengths(lengths, self.samples)
        # With equal sizes a chunk is one rank's batch, so that W ranks with batch size B read the same batches as one
        # rank with batch size B and W micro-steps. With unequal sizes a chunk is a whole micro-step.
        world_size, equal = len(batch_sizes), len(set(batch_sizes)) == 1 and not balanced
        chunk = batch_sizes[0] if equal else self._shares.total
        plan = OrderPlan(seed=seed, shuffle=shuffle, curriculum=curriculum)
        if limit is not None:
            plan = replace(plan, **asdict(limit), fixed_ranks=world_size if fix_batches else 0)
        else:
            plan = replace(plan, chunk=0 if lengths is None else chunk)
            if fix_batches:
                plan = replace(plan, fixed_ranks=world_size if equal else 1, fixed_batch=chunk)
        self._own_plan = self._plan = plan
        self._ordered: tuple[OrderPlan, int, tuple[Tensor | range, list[int]]] | None = None
        self.position = Position(1, 0)
        """Position after the last update that was read to its end."""
        self._reader = BatchLoader(dataset, collate, num_workers=num_workers, pin_memory=pin_memory)
        if limit is not None:
            assert self._lengths is not None, "batches by tokens need lengths"
            limit.require_fit(lengths or (), "train")
            self._reader.dummy = int(self._lengths.argmin())
        self._check_size()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples per micro-step of each rank; tokens where batches are made by tokens and balanced."""
        return self._shares.batch_sizes

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, where batches are made by tokens; else 0."""
        return int(self._lengths.max()) if self._own_plan.max_tokens and self._lengths is not None else 0

    def set_batch_sizes(self, batch_sizes: Sequence[int]) -> None:
        """Divide the next updates among the ranks in another way; all ranks call it after the same update."""
        assert sum(batch_sizes) == self._shares.total, "the global batch stays"
        self._shares = replace(self._shares, batch_sizes=tuple(batch_sizes))

    def _check_size(self) -> None:
        world_size = len(self._shares.batch_sizes)
        dropping = " with --drop-last" if self._shares.drop_last else ""
        if self._plan.max_tokens and not self._balanced:
            batches = len(self._order()[1])
            if batches < world_size:
                raise RequestError(
                    f"the training data makes {batches} batches of at most {self._plan.max_tokens} tokens, but "
                    f"{world_size} ranks need at least {world_size}, or some rank never gets a batch: use fewer ranks "
                    "or a smaller --max-tokens"
                )
        elif self._balanced and self.samples < (world_size if self._plan.max_tokens else self._shares.total):
            raise RequestError(
                f"the training data has {self.samples} samples, too few for a global batch of {self._shares.total} on "
                f"{world_size} ranks: give a smaller --global-batch-size"
            )
        elif not self._balanced and self.samples < self._shares.needed:
            sizes = sorted(set(self._shares.batch_sizes))
            raise RequestError(
                f"the training data has {self.samples} samples, but {world_size} ranks with a batch size of "
                f"{' or '.join(map(str, sizes))} need at least {self._shares.needed}{dropping}, or some rank never "
                "gets a batch: use fewer ranks or a smaller --batch-size"
            )

    def state_dict(self) -> dict[str, int]:
        """Return the position and the epoch's order plan; the end of an epoch is saved as the start of the next."""
        ended = not self.updates_left(1)
        plan = self._own_plan if ended else self._plan
        return {
            "epoch": self.position.epoch + ended,
            "consumed": 0 if ended else self.position.consumed,
            "samples": self.samples,
            **{name: int(value) for name, value in asdict(plan).items()},
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of another run, which may have had another world size and other batch sizes.

        Within a begun epoch the other run's seed and shuffling apply, because the remaining samples follow from its
        order; the next epoch uses this run's.

        Raises:
            RequestError: the state belongs to other data.
        """
        self.require_fit(state)
        epoch, consumed = state["epoch"], state["consumed"]
        if consumed >= state["samples"]:
            epoch, consumed = epoch + 1, 0
        self.position = Position(epoch, consumed)
        self._plan = OrderPlan.from_state(state) if consumed else self._own_plan

    def require_fit(self, state: Mapping[str, int]) -> None:
        epoch, consumed = state["epoch"], state["consumed"]
        if consumed and state.get("stream"):
            raise RequestError(
                f"the checkpoint is inside epoch {epoch} of a stream, but the training data has samples by index now: "
                "resume with the same data, or start at epoch 1 with --reset-dataloader"
            )
        if consumed and state["samples"] != self.samples:
            raise RequestError(
                f"the checkpoint is at sample {consumed} of {state['samples']} of epoch {epoch}, but the training data "
                f"has {self.samples} samples now; resume with the same data"
            )
        plan = OrderPlan.from_state(state)
        if consumed and plan.fixed_ranks and not (plan.fixed_batch or plan.max_tokens):
            raise RequestError(f"fixed_ranks is {plan.fixed_ranks}, but neither fixed_batch nor max_tokens is set")
        if consumed and plan.shuffle and (plan.chunk or plan.max_tokens) and self._lengths is None:
            raise RequestError(
                f"the checkpoint is inside epoch {epoch}, whose batches are grouped by length, but the task gives no "
                "lengths now; resume with the same task"
            )

    def next_epoch(self) -> None:
        self.position = Position(self.position.epoch + 1, 0)
        self._plan = self._own_plan

    @property
    def smallest(self) -> int:
        """Fewest samples that any rank may read in one micro-step; 1 if batches are made by tokens, or balanced."""
        return 1 if self._own_plan.max_tokens or self._balanced else self._shares.smallest(self.samples)

    def _order(self) -> tuple[Tensor | range, list[int]]:
        """Return the order of this epoch, and the ends of its batches if it was begun with batches by tokens."""
        plan, epoch = self._plan, self.position.epoch
        if self._ordered is None or self._ordered[:2] != (plan, epoch):
            self._ordered = plan, epoch, plan.order(self.samples, epoch, self._lengths)
        return self._ordered[2]

    def _micro_steps(self, consumed: int) -> MicroSteps:
        """Return the micro-steps of this epoch after ``consumed`` samples."""
        limit, shares = self._own_plan.limit, self._shares
        if limit is None:
            return shares.micro_steps(consumed, self.samples)
        order, ends = self._order()
        if self._plan.limit == limit and (consumed == 0 or consumed in ends):
            ends = [end for end in ends if end > consumed]
        else:  # the epoch was begun with other batches
            ends = [consumed + end for end in limit.ends(sizes_in_order(self._lengths, order)[consumed:])]
        if self._balanced:
            return shared_micro_steps(consumed, ends, shares)
        world_size = len(shares.batch_sizes)
        return token_micro_steps(consumed, ends, rank=shares.rank, world_size=world_size, drop_last=shares.drop_last)

    def updates_per_epoch(self, update_freq: int) -> int:
        """Return the number of updates of a whole epoch; if batches are made by tokens, of this epoch."""
        return -(-len(self._micro_steps(0).starts) // update_freq)

    def updates_left(self, update_freq: int) -> int:
        consumed = self.position.consumed
        return 0 if consumed == self.samples else -(-len(self._micro_steps(consumed).starts) // update_freq)

    def updates(self, update_freq: int) -> Iterator[Update]:
        """Yield the updates of the rest of the epoch; read each to its end before taking the next."""
        epoch = self.position.epoch
        seed = mix_seed(self._plan.seed, epoch)
        shares = None
        while shares is not self._shares:  # at first, and with shares that have changed: what was read ahead is dropped
            shares, steps = self._shares, self._micro_steps(self.position.consumed)
            read = self._reader.read(self._order()[0], steps.starts, steps.bounds, seed=seed)
            for first in range(0, len(steps.starts), update_freq):
                group = steps.starts[first : first + update_freq]
                after = Position(epoch, steps.end(group[-1]))
                micro_batches = self._micro_batches(read, len(group), after)
                yield Update(len(group), after.consumed - group[0], after.consumed, micro_batches)
                assert self.position == after, "the previous step was not read to its end"
                if shares is not self._shares:
                    break

    def _micro_batches(self, read: Iterator[MicroBatch], count: int, after: Position) -> Iterator[MicroBatch]:
        for index in range(count):
            micro_batch = next(read)
            if index == count - 1:
                self.position = after
            yield micro_batch

    def close(self) -> None:
        self._reader.close()


class EvalBatches:
    """Batches of one rank over a whole split, every sample once; iterated anew for each evaluation.

    All ranks have the same number of micro-steps, so that collectives within them match; a rank without samples gets
    dummies. With lengths, samples are sorted by length, which needs the least padding; a sum over the split does not
    depend on the order.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        collate: Collate,
        batch_sizes: Sequence[int],
        rank: int,
        split: str = "valid",
        num_workers: int = 0,
        lengths: Sequence[int] | None = None,
        limit: TokenLimit | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.samples = len(dataset)
        """Samples of the split, over all ranks."""
        if not self.samples:
            raise RequestError(f"the {split} data is empty")
        shares = Shares(tuple(batch_sizes), rank)
        self._order: Tensor | range = range(self.samples)
        self._steps = shares.micro_steps(0, self.samples)
        if lengths is not None:
            known = _checked_lengths(lengths, self.samples)
            self._order = torch.argsort(known, stable=True)
            if limit is not None:
                limit.require_fit(lengths, split)
                ends = limit.ends(sizes_in_order(known, self._order))
                self._steps = token_micro_steps(0, ends, rank=rank, world_size=len(batch_sizes))
        # Persistent workers would hold memory between two evaluations, which may be hours apart.
        self._reader = BatchLoader(
            dataset, collate, num_workers=num_workers, pin_memory=pin_memory, persistent_workers=False
        )

    def __len__(self) -> int:
        return len(self._steps.starts)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._reader.read(self._order, self._steps.starts, self._steps.bounds, seed=0)

    def close(self) -> None:
        self._reader.close()


def _checked_lengths(lengths: Sequence[int], samples: int) -> Tensor:
    if len(lengths) != samples:
        raise RequestError(f"the task gives {len(lengths)} lengths for {samples} samples; it must give one each")
    return torch.as_tensor(lengths)
