"""Copy a few numbers from a GPU to the host without blocking the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Numbers on their way to the host, to be read once; without an event they are there."""

    def __init__(self, memory: Tensor, event: Any = None, free: list[HostCopy] | None = None) -> None:
        self._memory = memory
        self._event = event
        """Behind the copy in the device's queue, as ``torch.cuda.Event``."""
        self._free = free

    def begin(self, value: Tensor) -> None:
        """Queue the copy of a tensor behind the work that computes it."""
        self._memory.copy_(value.detach().reshape(-1), non_blocking=True)
        self._event.record()

    def arrived(self) -> bool:
        """Return whether the numbers can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> list[Any]:
        """Wait for the copy and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers = list(self._memory.tolist())
        if self._free is not None:
            self._free.append(self)
        return numbers


class HostCopies:
    """Pool of copies to the host; a copy that was read is used again for a tensor of the same size and dtype.

    ``memory`` allocates ``[elements]`` of a dtype that is page-locked, so that a GPU copies asynchronously. An event is
    reused, never destroyed, because destroying one can wait for the device.
    """

    def __init__(self, event: Callable[[], Any], memory: Callable[[int, torch.dtype], Tensor]) -> None:
        self._event = event
        self._memory = memory
        self._free: dict[tuple[int, torch.dtype], list[HostCopy]] = {}

    def begin(self, value: Tensor) -> HostCopy:
        """Begin to copy a tensor to the host."""
        free = self._free.setdefault((value.numel(), value.dtype), [])
        copy = free.pop() if free else HostCopy(self._memory(value.numel(), value.dtype), self._event(), free)
        copy.begin(value)
        return copy


@cache
def host_copies(device: torch.device) -> HostCopies | None:
    """Return the pool of copies for a GPU; None for a CPU, which needs no copies."""
    if device.type != "cuda":
        return None
    return HostCopies(torch.cuda.Event, lambda elements, dtype: torch.empty(elements, dtype=dtype, pin_memory=True))


def begin_copy(value: Tensor, copies: HostCopies | None) -> HostCopy:
    """Begin to copy a tensor to the host; without ``copies`` it is on the CPU and is read at once."""
    return HostCopy(value.detach().reshape(-1).clone()) if copies is None else copies.begin(value)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor on the device, without waiting for work queued there."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    # A copy from memory that is not pinned would wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
