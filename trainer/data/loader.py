"""Load batches of a dataset, in the rank itself or ahead of it in worker processes that end with the rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trainer.contract.errors import RequestError, TrainingError
from trainer.data.dataset import SizedDataset
from trainer.data.seeds import seed_all
from trainer.data.worker_start import start_method
from trainer.host import process_guard
from trainer.host.descendants import die_with_parent_process
from trainer.host.stop_request import save_signals_blocked

Collate = Callable[[list[Any]], Any]
Bounds = Callable[[int], tuple[int, int]]
"""Function from a micro-step's start to the start and end of this rank's slice of the order."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
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
class _Request:
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
        if self._getitems is not None:
            return self._collate(self._getitems(indices))
        dataset = self._dataset
        return self._collate([dataset[index] for index in indices])

    def __getitem__(self, request: _Request) -> Any:
        """Read a batch in a worker; seeding each batch makes it independent of the worker and of resuming."""
        seed_all(request.seed)
        try:
            return self(request.indices)
        except (RequestError, TrainingError) as error:
            return CarriedError(error)


class _Requests(Sampler[_Request]):
    """Batches that the workers read next; replaced at each epoch, while the workers persist."""

    def __init__(self) -> None:
        self.requests: Iterable[_Request] = ()

    def __iter__(self) -> Iterator[_Request]:
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

        Args:
            dataset: samples by index.
            collate: turns a list of samples into a batch.
            num_workers: worker processes; 0 reads in this one.
            pin_memory: put batches into page-locked memory.
            persistent_workers: keep the workers from one ``read`` to the next; otherwise they end with each.
        """
        self._persistent = persistent_workers
        self._fetch = _Fetch(dataset, collate)
        self._pin = pinned if pin_memory else None
        self._requests = _Requests()
        self.dummy = 0
        """Index of the sample of which a dummy batch is made."""
        self._ahead: Iterator[Any] = iter(())
        self._loader: DataLoader[Any] | None = None
        if num_workers:
            method = start_method(self._fetch, cuda_in_use=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
            context = multiprocessing.get_context(method)
            if method == "forkserver":
                context.set_forkserver_preload([__name__])  # torch is then loaded once for all workers
            self._loader = DataLoader(
                self._fetch,  # type: ignore[arg-type]  # map-style: its indices are requests
                batch_size=None,
                sampler=self._requests,
                num_workers=num_workers,
                collate_fn=unchanged,
                pin_memory=pin_memory,
                worker_init_fn=partial(start_worker, os.getpid(), method),
                # Without its own generator the loader draws from the one that dropout uses.
                generator=torch.Generator(),
                multiprocessing_context=context,
                persistent_workers=persistent_workers,
            )

    def read(self, order: Tensor | range, starts: Sequence[int], bounds: Bounds, *, seed: int) -> Iterator[MicroBatch]:
        """Yield one micro-batch per start, a dummy where the slice is empty; ends the previous ``read``.

        Args:
            order: indices into the dataset.
            starts: index in the order at which each micro-step starts.
            bounds: function from a start to the ends of this rank's slice of the order.
            seed: seed of the random numbers that workers draw.
        """
        if self._loader is None:
            return self._read_here(order, starts, bounds)
        self._requests.requests = (
            _Request(_indices(order, low, high), mix_seed(seed, low)) for low, high in map(bounds, starts) if low < high
        )
        # A scheduler may signal every process of a job, including a worker that does not ignore the signal yet.
        with save_signals_blocked():
            self._ahead = iter(self._loader)
        return self._read_ahead(starts, bounds)

    def _read_here(self, order: Tensor | range, starts: Sequence[int], bounds: Bounds) -> Iterator[MicroBatch]:
        fetch, pin = self._fetch, self._pin
        for start in starts:
            low, high = bounds(start)
            if low < high:
                batch = fetch(_indices(order, low, high))
                yield MicroBatch(batch if pin is None else pin(batch), high - low)
            else:
                yield self._dummy()

    def _read_ahead(self, starts: Sequence[int], bounds: Bounds) -> Iterator[MicroBatch]:
        try:
            for start in starts:
                low, high = bounds(start)
                if low < high:
                    batch = next(self._ahead)
                    if isinstance(batch, CarriedError):
                        raise batch.error
                    yield MicroBatch(batch, high - low)
                else:
                    yield self._dummy()
        finally:
            if not self._persistent:
                self._ahead = iter(())

    def _dummy(self) -> MicroBatch:
        batch = self._fetch([self.dummy] * 2)
        return MicroBatch(batch if self._pin is None else self._pin(batch), 0)

    def close(self) -> None:
        """End the workers, by releasing the loader and its iterator."""
        self._loader = None
        self._ahead = iter(())


def _indices(order: Tensor | range, low: int, high: int) -> list[int]:
    part = order[low:high]
    return part.tolist() if isinstance(part, Tensor) else list(part)


def unchanged(batch: Any) -> Any:
    """Return the batch, which the worker has collated already."""
    return batch


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors copied to page-locked memory."""
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {key: pinned(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pinned, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(pinned, batch))
    return batch


def start_worker(rank_pid: int, method: str, worker: int) -> None:
    """Initialize a worker: it dies with its rank, and ignores the signals that the rank handles."""
    if method == "forkserver":
        process_guard.die_with_process(rank_pid)  # its parent is the fork server
    else:
        die_with_parent_process()
        if os.getppid() != rank_pid:  # the rank ended before the call above
            os._exit(1)
    # A scheduler may send these signals to every process of a job.
    process_guard.set_signals(ignored=(signal.SIGTERM, signal.SIGHUP))
