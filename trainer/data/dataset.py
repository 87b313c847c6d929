"""Interfaces of datasets: samples by index, or a stream of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from torch.utils.data import IterableDataset


class SizedDataset(Protocol):
    """Map-style dataset: samples by index. ``__getitems__(indices)``, if present, fetches a whole batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class StreamDataset(Protocol):
    """Iterable dataset: a sequence of samples that is equal on all ranks and each time it is iterated from the start.

    Every rank reads the whole stream and keeps its share. ``shard(count, index)``, if present, returns the part of one
    rank, which then reads only that part. ``__len__``, if present, is the number of samples of an epoch, and
    ``set_epoch(epoch)``, if present, is called before each epoch. With ``state_dict()`` and ``load_state_dict(state)``,
    the protocol of torchdata's StatefulDataLoader, a resumed training reads on from the state after the last sample of
    a step; iterated again, the dataset begins from the start.
    """

    def __iter__(self) -> Iterator[Any]: ...


AnyDataset = SizedDataset | StreamDataset


def is_stream(dataset: AnyDataset) -> TypeGuard[StreamDataset]:
    """Return whether a dataset can only be iterated and has no samples by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def is_stateful(dataset: StreamDataset) -> bool:
    """Return whether a stream can be read on from a state of its own."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def length_of(dataset: StreamDataset) -> int | None:
    """Return the number of samples of an epoch of a stream; None if it has no length."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
