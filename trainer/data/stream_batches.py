"""Batches of a dataset that can only be iterated: each rank's share, epochs that all ranks end together, resuming.

Every rank reads the same stream and keeps the samples that a map-style dataset without shuffling would give it, so that
the position is valid for any world size. A dataset with ``shard(count, index)`` gives each rank a stream of its own;
their lengths may differ. Before each update the ranks exchange the number of samples that they have read: a rank whose
stream has ended yields dummy batches until all streams have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from trainer.contract.errors import RequestError, TrainingError
from trainer.data.batches import Position, Update
from trainer.data.dataset import StreamDataset, is_stateful, length_of
from trainer.data.loader import Collate, MicroBatch
from trainer.data.stream_reader import StreamBlock, StreamReader

Exchange = Callable[[Any], list[Any]]
"""Collective: return every rank's argument, in rank order."""


class StreamBatches:
    """Training batches of one rank from a stream; the counterpart of ``EpochBatches``."""

    smallest = 2
    """In place of ``EpochBatches.smallest``: enough for a batch norm, because the last batch's size is not known."""

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        collate: Collate,
        batch_sizes: Sequence[int],
        rank: int,
        seed: int,
        exchange: Exchange,
        warn: Callable[[str], None],
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        """Start at epoch 1.

        The stream draws random numbers from ``seed`` in each epoch, equal on all ranks. Every rank calls ``exchange``
        equally often. ``warn`` is called if the length of an epoch differs from that of the dataset. Each worker
        process reads the whole stream. For the others see ``EpochBatches``.
        """
        self.length = length_of(dataset)
        """Samples of an epoch; None if unknown."""
        self.samples = self.length or 0
        self._total = sum(batch_sizes)
        self._drop_last = drop_last
        self._reader = StreamReader(
            dataset,
            collate=collate,
            batch_sizes=batch_sizes,
            rank=rank,
            num_workers=num_workers,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )
        self._batch_size = batch_sizes[rank]
        self._exchange, self._warn = exchange, warn
        self._own_seed = self._seed = seed
        self.position = Position(1, 0)
        """Position after the last update that was read to its end."""
        self._continued = False
        """Whether this pass began from a state of the stream: its first sample is not that of the epoch."""
        self._first = ""
        """Digest of the first sample of the update that was read last; empty if unknown."""
        self._end: Position | None = None
        """End of this epoch; None until it is known."""
        self._head = ""
        """Digest of the first sample of this epoch; empty if unknown."""
        # Of shards each rank has another state, and a checkpoint holds those of rank 0.
        self._stateful = is_stateful(dataset) and not self._reader.shards
        self._stream_state: dict[str, Any] | None = None
        """State of a stateful stream at ``position``; None at the start of an epoch."""
        self._dummy: Any = None
        """Dummy batch, made of the last sample; None until the stream has ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return position and parameters of the stream; the end of an epoch is saved as the start of the next."""
        ended = self.position == self._end
        return {
            "epoch": self.position.epoch + ended,
            "consumed": 0 if ended else self.position.consumed,
            "samples": self.samples or 1,
            "seed": self._own_seed if ended else self._seed,
            "shuffle": 0,
            "chunk": self._total,
            "stream": 1,
            "shards": self._reader.shards,
            "head": "" if ended else self._head,
            **({} if ended or self._stream_state is None else {"stream_state": self._stream_state}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another run.

        A stream reads on from its own state, if it has one and the other run had saved it; otherwise it is read again,
        and the samples before the position are skipped.
        """
        self.require_fit(state)
        self.position = Position(state["epoch"], state["consumed"])
        begun = state["consumed"] > 0
        self._seed = state["seed"] if begun else self._own_seed
        self._head = state["head"] if begun and not self._reader.shards else ""  # with shards it is that of rank 0
        self._stream_state = state.get("stream_state") if begun and self._stateful else None

    def require_fit(self, state: Mapping[str, Any]) -> None:
        """Require that a saved position is valid for this stream."""
        if not state["consumed"]:
            return
        if not state.get("stream"):
            raise RequestError(
                f"the checkpoint is inside epoch {state['epoch']} of data with samples by index, but the training data "
                "is a stream now; resume with the same data, or start at epoch 1 with --reset-dataloader"
            )
        shards, chunk = state["shards"], state["chunk"]
        if shards != self._reader.shards or (shards and chunk != self._total):
            raise RequestError(
                f"the checkpoint is inside epoch {state['epoch']} of a stream in {shards or 'no'} parts with batches "
                f"of {chunk} samples in all, but now it has {self._reader.shards or 'no'} parts and {self._total}: "
                "the samples already seen cannot be skipped; resume on as many ranks with the same --batch-size, or "
                "start at epoch 1 with --reset-dataloader"
            )

    def next_epoch(self) -> None:
        self.position = Position(self.position.epoch + 1, 0)
        self._seed, self._end, self._head, self._stream_state = self._own_seed, None, "", None

    def updates_per_epoch(self, update_freq: int) -> int:
        """Return the number of updates of a whole epoch; 0 if unknown."""
        whole, left = divmod(self.samples, self._total)
        return -(-(whole + (left > 0 and not self._drop_last)) // update_freq)

    def updates_left(self, update_freq: int) -> int:
        """Return 0 at the end of the epoch; before it the number if the length is known, else 1."""
        done = self.position.consumed // self._total // update_freq
        return 0 if self.position == self._end else max(1, self.updates_per_epoch(update_freq) - done)

    def updates(self, update_freq: int) -> Iterator[Update]:
        """Yield the updates of the rest of the epoch; read each to its end before taking the next.

        The following update is read before this one is yielded, to learn whether the epoch ends with this one.

        Raises:
            RequestError: the stream is empty, or differs from the one before the checkpoint.
            TrainingError: the ranks read different streams.
        """
        epoch, consumed = self.position.epoch, self.position.consumed
        # From a shard each rank has read its own batches, as far as there were any.
        skip = consumed // self._total * self._batch_size if self._reader.shards else consumed
        read = self._reader.read(
            epoch=epoch, skip=skip, seed=self._seed, stateful=self._stateful, state=self._stream_state
        )
        self._continued = self._stream_state is not None
        following = self._next(read, update_freq, Position(epoch, consumed))
        if following is None and not consumed:
            again = "" if epoch == 1 else f" in epoch {epoch}: its __iter__ must start from the beginning each time"
            raise RequestError(f"the training data is empty{again}")
        while following is not None:
            update, after, state = following
            following = self._next(read, update_freq, after)
            if state is not None:
                state["next"] = self._first  # of the update after this one
            if following is None:
                self._end = after
                self._compare_length(after.consumed)
            yield update
            assert self.position == after, "the previous step was not read to its end"
        self._end = self.position

    def _next(
        self, read: Iterator[StreamBlock], update_freq: int, before: Position
    ) -> tuple[Update, Position, dict[str, Any] | None] | None:
        """Read the next update, with the stream's state after it; return None on all ranks once no sample is left."""
        blocks = list(islice(read, update_freq))
        self._first = blocks[0].first if blocks else ""
        if blocks and not blocks[-1].total:
            self._dummy = blocks.pop().batch
        sizes = [[block.samples, block.total] for block in blocks]
        head = blocks[0].head if blocks else self._head
        gathered = self._exchange([sizes, head, bool(blocks) or self._dummy is not None])
        micro_steps = max(len(each) for each, *_ in gathered)
        if not micro_steps:
            return None
        self._require_same(gathered, head, before)
        empty = [rank for rank, (*_, has_batch) in enumerate(gathered) if not has_batch]
        if empty:
            raise RequestError(f"rank {empty[0]} gets no sample of the training data: use fewer ranks")
        if not self._continued:
            self._head = head
        state = blocks[-1].state if blocks else None
        if len(blocks) < micro_steps:
            filler = StreamBlock(batch=self._dummy, samples=0, total=0, head=head)
            blocks += [filler] * (micro_steps - len(blocks))
        consumed = self._total * micro_steps if self._reader.shards else sum(total for _, total in sizes)
        after = Position(before.epoch, before.consumed + consumed)
        samples = sum(samples for each, *_ in gathered for samples, _ in each)
        filled = [sum(samples > 0 for samples, _ in each) for each, *_ in gathered]
        batches = self._micro_batches(blocks, after, state)
        update = Update(micro_steps, samples, after.consumed, batches, data_rank=filled.index(max(filled)))
        return update, after, state

    def _require_same(self, gathered: list[Any], head: str, before: Position) -> None:
        """Require that all ranks read one stream, and the same one as before the checkpoint."""
        if self._head and head and head != self._head and not self._continued:
            raise RequestError(
                f"the stream of epoch {before.epoch} does not begin with the sample that it began with when the "
                "checkpoint was written, so the samples already seen cannot be skipped; start at epoch 1 with "
                "--reset-dataloader"
            )
        if self._reader.shards:
            return
        heads = {each for _, each, _ in gathered if each}
        if len(heads) > 1:
            raise RequestError(
                "the ranks read different streams: every rank must read the same one, and the trainer divides it among "
                "them; a dataset that divides itself has shard(count, index)"
            )
        totals = [[total for _, total in each] for each, *_ in gathered]
        for rank, each in enumerate(totals):
            if each != totals[0]:
                raise TrainingError(
                    f"the ranks read different streams in epoch {before.epoch}, after sample {before.consumed}: rank 0 "
                    f"has {sum(totals[0])} more samples in this step, rank {rank} {sum(each)}"
                )

    def _micro_batches(
        self, blocks: list[StreamBlock], after: Position, state: dict[str, Any] | None
    ) -> Iterator[MicroBatch]:
        for index, block in enumerate(blocks):
            if index == len(blocks) - 1:
                self.position, self._stream_state = after, state
            yield MicroBatch(block.batch, block.samples)

    def _compare_length(self, consumed: int) -> None:
        if self.length is None or self._reader.shards:
            return
        if consumed != self.samples - (self.samples % self._total if self._drop_last else 0):
            self._warn(f"an epoch of the training data has {consumed} samples, but its length is {self.samples}")


class StreamEvalBatches:
    """Batches of one rank over a split that is a stream; the counterpart of ``EvalBatches``."""

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        collate: Collate,
        batch_sizes: Sequence[int],
        rank: int,
        exchange: Exchange,
        split: str = "valid",
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._split, self._exchange = split, exchange
        self._total = 0
        """Samples of the stream in the last pass."""
        self._reader = StreamReader(
            dataset, collate=collate, batch_sizes=batch_sizes, rank=rank, num_workers=num_workers, pin_memory=pin_memory
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's batches, at least one."""
        read = self._reader.read(epoch=1, skip=0, seed=0)
        block = next(read)
        gathered = self._exchange([block.head, block.batch is not None])
        if not all(has_batch for _, has_batch in gathered):
            raise RequestError(f"the {self._split} data is empty{' on a rank' if self._reader.shards else ''}")
        if not self._reader.shards and len({head for head, _ in gathered}) > 1:
            raise RequestError(
                f"the ranks read different streams of the {self._split} data: every rank must read the same one, "
                "and the trainer divides it among them"
            )
        self._total = 0
        while block.total:
            self._total += block.total
            yield MicroBatch(block.batch, block.samples)
            block = next(read)

    def require_same(self) -> None:
        """Require that all ranks have read equally many samples in a whole pass; a collective."""
        totals = [0] if self._reader.shards else self._exchange(self._total)
        for rank, total in enumerate(totals):
            if total != totals[0]:
                raise TrainingError(
                    f"the ranks read different streams of the {self._split} data: rank 0 has {totals[0]} samples, rank "
                    f"{rank} {total}"
                )
