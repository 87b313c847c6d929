"""What the trainer asks of a dataset."""

from __future__ import annotations

from typing import Any, Protocol


class SizedDataset(Protocol):
    """A map-style dataset: samples by index. ``__getitems__(indices)``, where present, fetches a whole batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...
