"""Iterators with a position: over all items, the items of one shard, or groups of items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class CountingIterator(Generic[T]):
    """Iterator that counts the items taken."""

    def __init__(self, source: Iterable[T], *, start: int = 0, total: int | None = None) -> None:
        """Count from ``start`` to ``total``, by default ``start + len(source)``; further items are not read."""
        self._source = iter(source)
        self.n = start
        """Items taken, including the ``start`` items before this iterator."""
        self.total = start + len(source) if total is None else total  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self.has_next():
            raise StopIteration
        try:
            item = next(self._source)
        except StopIteration:
            raise IndexError(f"the source ended after {self.n} of {self.total} items") from None
        self.n += 1
        return item

    def has_next(self) -> bool:
        """Return whether there is another item."""
        return self.n < self.total

    def skip(self, count: int) -> None:
        """Pass over the next items."""
        for _ in islice(self, count):
            pass

    def take(self, total: int) -> None:
        """End after ``total`` items at the latest."""
        self.total = min(self.total, total)


class ShardedIterator(CountingIterator[T]):
    """Items ``shard``, ``shard + shards``, ...; shards have equal lengths, missing items are ``fill``."""

    def __init__(self, items: Sequence[T], shards: int, shard: int, *, fill: T) -> None:
        if not 0 <= shard < shards:
            raise ValueError(f"the shard must be from 0 to {shards - 1}, not {shard}")
        length = -(-len(items) // shards)
        super().__init__(
            (items[i] if i < len(items) else fill for i in range(shard, length * shards, shards)), total=length
        )


class GroupedIterator(CountingIterator[list[T]]):
    """Lists of ``size`` items; a shorter last list is left out with ``skip_remainder``."""

    def __init__(self, items: Sequence[T], size: int, *, skip_remainder: bool = False) -> None:
        length = len(items) // size if skip_remainder else -(-len(items) // size)
        super().__init__((list(items[i * size : (i + 1) * size]) for i in range(length)), total=length)
