"""Load batches of a dataset, in the rank itself or ahead of it in worker processes that end with the rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trainer.contract.errors import RequestError, TrainingError
from trainer.data.dataset import SizedDataset
from trainer.data.seeds import seed_all
from trainer.host import process_guard
from trainer.host.descendants import die_with_parent_process
from trainer.host.stop_request import SAVE_SIGNALS, signals_blocked

Collate = Callable[[list[Any]], Any]
Bounds = Callable[[int], tuple[int, int]]
"""Function from a micro-step's start to the start and end of this rank's slice of the order."""


class MicroBatch(NamedTuple):
    """Batch of one rank in one micro-step."""

    batch: Any
    """Collated samples; in a dummy one sample of the dataset twice, because a batch norm needs two."""
    samples: int
    """Number of samples; 0 for a dummy, whose loss has weight zero."""


def mix_seed(*numbers: int) -> int:
    """Hash small numbers into a seed, so that neighbouring numbers give unrelated seeds (finalizer of splitmix64)."""
    seed = 0
    for number in numbers:
        seed = (seed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return seed


@dataclass(frozen=True)
class _BatchRequest:
    """Request to a worker for one batch."""

    indices: list[int]
    seed: int
    """Seed of the random numbers drawn while this batch is read, independent of the worker."""


@dataclass(frozen=True)
class CarriedError:
    """Error of a worker, returned as data so that the rank raises it without the DataLoader's traceback around it."""

    error: RequestError | TrainingError


class _Fetch:
    """Function that reads and collates a batch; in a worker, the DataLoader's dataset."""

    def __init__(self, dataset: SizedDataset, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._getitems: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)

    def __call__(self, indices: list[int]) -> Any:
        getitems = self._getitems
        return self._collate([self._dataset[i] for i in indices] if getitems is None else getitems(indices))

    def __getitem__(self, request: _BatchRequest) -> Any:
        """Read a batch in a worker; seeding each batch makes it independent of the worker and of resuming."""
        seed_all(request.seed)
        try:
            return self(request.indices)
        except (RequestError, TrainingError) as error:
            return CarriedError(error)


class _BatchRequests(Sampler[_BatchRequest]):
    """Batches that the workers read next; replaced at each epoch, while the workers persist."""

    def __init__(self) -> None:
        self.requests: Iterable[_BatchRequest] = ()

    def __iter__(self) -> Iterator[_BatchRequest]:
        return iter(self.requests)


class BatchLoader:
    """Loader of slices of an order: in this process, or ahead of it in worker processes."""

    def __init__(
        self,
        dataset: SizedDataset,
        collate: Collate,
        *,
        num_workers: int,
        pin_memory: bool,
        persistent_workers: bool = True,
    ) -> None:
        """Prepare to read; the first ``read`` starts the workers.

        Without ``persistent_workers`` the workers end with each ``read``.
        """
        self._persistent = persistent_workers
        self._fetch = _Fetch(dataset, collate)
        self._pin = pinned if pin_memory else unchanged
        self._requests = _BatchRequests()
        self.dummy = 0
        """Index of the sample of which a dummy batch is made."""
        self._ahead: Iterator[Any] = iter(())
        self._loader: DataLoader[Any] | None = None
        if num_workers:
            self._loader = worker_loader(
                self._fetch,  # map-style: its indices are requests
                num_workers,
                sampler=self._requests,
                pin_memory=pin_memory,
                persistent_workers=persistent_workers,
            )

    def read(self, order: Tensor | range, starts: Sequence[int], bounds: Bounds, *, seed: int) -> Iterator[MicroBatch]:
        """Yield one micro-batch per start, a dummy where the slice is empty; ends the previous ``read``."""
        indices = _slices_of(order)
        if self._loader is None:
            return self._micro_batches(starts, bounds, lambda low, high: self._pin(self._fetch(indices(low, high))))
        self._requests.requests = (
            _BatchRequest(indices(low, high), mix_seed(seed, low)) for low, high in map(bounds, starts) if low < high
        )
        self._ahead = read_ahead(self._loader)
        return self._micro_batches(starts, bounds, lambda low, high: next(self._ahead))

    def _micro_batches(
        self, starts: Sequence[int], bounds: Bounds, batch_of: Callable[[int, int], Any]
    ) -> Iterator[MicroBatch]:
        try:
            for start in starts:
                low, high = bounds(start)
                if low < high:
                    yield MicroBatch(batch_of(low, high), high - low)
                else:
                    yield MicroBatch(self._pin(self._fetch([self.dummy] * 2)), 0)
        finally:
            if not self._persistent:
                self._ahead = iter(())

    def close(self) -> None:
        """End the workers."""
        self._loader = None
        self._ahead = iter(())


def worker_loader(dataset: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of whole batches, which its worker processes collate; they end with this process."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=unchanged,
        worker_init_fn=partial(start_worker, os.getpid()),
        # Without its own generator the loader draws from the one that dropout uses.
        generator=torch.Generator(),
        multiprocessing_context="fork",  # a task of the user's own need not be picklable
        **options,
    )


def read_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers and return the iterator over their batches, which raises their ``CarriedError``."""
    # A scheduler may signal every process of a job, including a worker that does not ignore the signal yet.
    with signals_blocked(SAVE_SIGNALS):
        batches = iter(loader)
    return map(_raise_carried, batches)


def _raise_carried(batch: Any) -> Any:
    if isinstance(batch, CarriedError):
        raise batch.error
    return batch


def _slices_of(order: Tensor | range) -> Callable[[int, int], list[int]]:
    """Return a function of the slices of an order, for slices that mostly follow each other."""
    # Numbers that are made of a tensor at once: for each small slice that would take longer than to copy the batch.
    block_size = 1024
    first, block = 0, list[int]()

    def indices(low: int, high: int) -> list[int]:
        nonlocal first, block
        if not first <= low <= high <= first + len(block):
            part = order[low : max(high, low + block_size)]
            first, block = low, part.tolist() if isinstance(part, Tensor) else list(part)
        return block[low - first : high - first]

    return indices


def unchanged(batch: Any) -> Any:
    """Return the batch as it is."""
    return batch


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors copied to page-locked memory."""
    return batch.pin_memory() if hasattr(batch, "pin_memory") else map_values(pinned, batch)


def map_values(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a dict, list or tuple with the function of each value; any other batch as it is."""
    if isinstance(batch, dict):
        return {key: function(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(function, batch))
    return batch


def leaves(batch: Any) -> Iterator[Any]:
    """Yield what is in a batch's dicts, lists and tuples."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def start_worker(rank_pid: int, worker: int) -> None:
    """Initialize a worker: it dies with its rank, and ignores the signals that the rank handles."""
    die_with_parent_process()
    if os.getppid() != rank_pid:  # the rank ended before the call above
        os._exit(1)
    # A scheduler may send these signals to every process of a job.
    process_guard.set_signals(ignored=(signal.SIGTERM, signal.SIGHUP))
