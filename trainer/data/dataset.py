"""What the trainer asks of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from torch.utils.data import IterableDataset


class SizedDataset(Protocol):
    """A map-style dataset: samples by index. ``__getitems__(indices)``, where present, fetches a whole batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class StreamDataset(Protocol):
    """Samples one after the other, alike on all ranks and in every epoch that is begun anew.

    Every rank reads the whole stream and keeps its share. ``shard(count, index)``, where present, returns the part of
    one rank, which then reads only that. ``__len__``, where present, tells the samples of an epoch, and
    ``set_epoch(epoch)`` is told the epoch before it is read.
    """

    def __iter__(self) -> Iterator[Any]: ...


AnyDataset = SizedDataset | StreamDataset


def is_stream(dataset: AnyDataset) -> TypeGuard[StreamDataset]:
    """Return whether a dataset has no samples by index, but can be iterated."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def length_of(dataset: StreamDataset) -> int | None:
    """Return the samples of an epoch of a stream, where it tells them."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
