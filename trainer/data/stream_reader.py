"""Read a dataset that can only be iterated, for one rank: its samples of each micro-step, as a block.

Each worker process of a rank reads the whole stream and collates every n-th block of it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from trainer.contract.errors import RequestError, TrainingError
from trainer.data.dataset import StreamDataset
from trainer.data.loader import CarriedError, Collate, mix_seed, pinned, read_ahead, worker_loader
from trainer.data.seeds import RandomNumbers
from trainer.data.shares import Shares
from trainer.distributed.encoding import encode, to_bytes


@dataclass(frozen=True, kw_only=True)
class StreamBlock:
    """Samples of one micro-step as one rank reads them."""

    batch: Any
    """This rank's batch; if it has no sample, a batch of the stream's last sample twice; None in an empty stream."""
    samples: int
    """Samples of this rank."""
    total: int
    """Samples of all ranks that read this stream; 0 after its end."""
    head: str
    """Digest of the first sample that was read; empty if it cannot be encoded."""
    first: str = ""
    """Digest of the first sample of this micro-step; only of a stateful stream."""
    state: dict[str, Any] | None = None
    """State of a stateful stream after the last sample of this micro-step."""


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Pass over a stream by one process."""

    dataset: StreamDataset
    collate: Collate
    shares: Shares
    rank: int
    may_be_short: bool
    """Whether the stream may have fewer samples than ``skip``: another rank's shard is longer."""
    epoch: int = 1
    skip: int = 0
    """Samples at the start to skip."""
    seed: int = 0
    worker: int = 0
    workers: int = 1
    """Worker processes of the rank; worker i yields blocks i, i + workers, ..."""
    stateful: bool = False
    """Whether each block has the state of the stream."""
    state: Mapping[str, Any] | None = None
    """State of the stream after the first ``skip`` samples, which are then not read."""

    def __iter__(self) -> Iterator[StreamBlock]:
        """Yield the blocks of this process, then a block with a total of 0."""
        numbers = RandomNumbers(mix_seed(self.seed, self.epoch))
        low, high = self.shares.bounds(self.shares.total)(0)
        read_so_far, index, head, last = 0, 0, "", None
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        if self.state is not None:
            self._restore(self.state, numbers)
            read_so_far = self.skip
        begin = read_so_far
        with numbers():
            source = iter(self.dataset)
        while True:
            own: list[Any] = []
            total, first = 0, ""
            mine = index % self.workers == self.worker
            with numbers():
                for sample in source:
                    last = sample
                    read_so_far += 1
                    if read_so_far == begin + 1:
                        head = self._digest(sample, numbers)
                        self._require_continued(head)
                    if read_so_far <= self.skip:
                        continue
                    if self.stateful and not total:
                        first = self._digest(sample, numbers)
                    if mine and low <= total < high:
                        own.append(sample)
                    total += 1
                    if total == self.shares.total:
                        break
            if read_so_far < self.skip and not self.may_be_short:
                raise RequestError(
                    f"the checkpoint is at sample {self.skip} of epoch {self.epoch}, but the stream ended after "
                    f"{read_so_far}; resume with the same data"
                )
            if total < self.shares.total and self.shares.drop_last:
                total, own = 0, []
            if mine or not total:
                given = own or ([] if last is None else [last, last])
                with numbers.seeded(mix_seed(self.seed, self.epoch, read_so_far, self.rank)):
                    batch = self.collate(given) if given else None
                state = self._state(numbers) if self.stateful and total else None
                yield StreamBlock(batch=batch, samples=len(own), total=total, head=head, first=first, state=state)
            if not total:
                return
            if total < self.shares.total:
                source = iter(())  # an iterator that has ended need not raise StopIteration again
            index += 1

    def _state(self, numbers: RandomNumbers) -> dict[str, Any]:
        state = self.dataset.state_dict()  # type: ignore[attr-defined]
        return {"dataset": copy.deepcopy(state), "random": numbers.state_dict()}

    def _restore(self, state: Mapping[str, Any], numbers: RandomNumbers) -> None:
        try:
            self.dataset.load_state_dict(copy.deepcopy(state["dataset"]))  # type: ignore[attr-defined]
            numbers.load_state_dict(state["random"])
        except Exception as error:
            raise RequestError(
                f"the stream's load_state_dict() cannot restore the state of the checkpoint: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error

    def _require_continued(self, digest: str) -> None:
        """Require that a restored stream goes on with the sample that came next when its state was taken."""
        if self.state is not None and digest and self.state.get("next") and digest != self.state["next"]:
            raise RequestError(
                f"after load_state_dict() the stream does not go on with sample {self.skip + 1} of epoch {self.epoch}: "
                "its state_dict() does not hold all that decides its samples; correct it, or leave out both methods, "
                "and the samples already seen are read again and skipped"
            )

    def _digest(self, sample: Any, numbers: RandomNumbers) -> str:
        try:
            with numbers.seeded(0):
                content = encode(self.collate([sample]))
        except Exception:  # noqa: BLE001 - user code; an error that matters comes again in training
            return ""
        return hashlib.blake2b(to_bytes(content), digest_size=16).hexdigest()


class _InWorker(IterableDataset[Any]):
    """Pass over a stream in worker processes, which divide its blocks among them."""

    def __init__(self, reading: _Reading) -> None:
        self._reading = reading

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        reading = replace(self._reading, worker=info.id, workers=info.num_workers)
        # A dataset that divides its samples by get_worker_info must yield all of them: the blocks are divided here.
        torch_worker._worker_info = None
        try:
            yield from reading
        except (RequestError, TrainingError) as error:
            yield CarriedError(error)


class StreamReader:
    """Reader of a stream for one rank, in this process or ahead of it in worker processes."""

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        collate: Collate,
        batch_sizes: Sequence[int],
        rank: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        """Prepare to read; see ``EpochBatches`` for the arguments."""
        self.shards = 0
        """Number of shards of the dataset, one per rank; 0 if every rank reads the whole dataset."""
        shares = Shares(tuple(batch_sizes), rank, drop_last)
        if callable(shard := getattr(dataset, "shard", None)):
            self.shards = len(batch_sizes)
            dataset = shard(self.shards, rank)
            shares = Shares((batch_sizes[rank],), 0, drop_last)
        self._reading = _Reading(
            dataset=dataset, collate=collate, shares=shares, rank=rank, may_be_short=self.shards > 0
        )
        self._num_workers = num_workers
        self._pin = pinned if pin_memory else None

    def read(
        self, *, epoch: int, skip: int, seed: int, stateful: bool = False, state: Mapping[str, Any] | None = None
    ) -> Iterator[StreamBlock]:
        """Yield the blocks of an epoch after the first ``skip`` samples, then a block with a total of 0.

        With ``stateful`` each block has the stream's state; with the ``state`` there, those samples are not read.

        Raises:
            RequestError: the stream has fewer than ``skip`` samples, or does not go on from the state.
        """
        reading = replace(self._reading, epoch=epoch, skip=skip, seed=seed, stateful=stateful, state=state)
        read = self._read_ahead(reading) if self._num_workers else iter(reading)
        return read if self._pin is None else (replace(block, batch=self._pin(block.batch)) for block in read)

    def _read_ahead(self, reading: _Reading) -> Iterator[StreamBlock]:
        head = ""
        for block in read_ahead(worker_loader(_InWorker(reading), self._num_workers)):  # round-robin over the workers
            head = head or block.head
            if block.head != head:
                raise RequestError(
                    "the reading processes of one rank read different streams: __iter__ must give the same samples in "
                    "each of them"
                )
            yield block
            if not block.total:
                return
