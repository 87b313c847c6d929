"""Copy a few numbers from a GPU to the host without blocking the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

HostMemory = Callable[[int, torch.dtype], Tensor]
"""Allocate ``[elements]`` of a dtype in page-locked memory, to which a GPU copies asynchronously."""


class DeviceEvent(Protocol):
    """Marker in a device's queue of work; the interface of ``torch.cuda.Event``."""

    def record(self) -> Any:
        """Place the marker behind all work queued so far."""

    def query(self) -> bool:
        """Return whether the device has reached the marker; never waits."""

    def synchronize(self) -> Any:
        """Wait until the device has reached the marker."""


class HostCopy:
    """Asynchronous copy of numbers to the host, to be read once; its memory and event are then reused."""

    def __init__(self, event: DeviceEvent, memory: Tensor, free: list[HostCopy]) -> None:
        self._event = event
        self._memory = memory
        self._free = free

    def begin(self, value: Tensor) -> None:
        """Queue the copy of a tensor behind the work that computes it."""
        self._memory.copy_(value.detach().reshape(-1), non_blocking=True)
        self._event.record()

    def arrived(self) -> bool:
        """Return whether the numbers can be read without waiting."""
        return self._event.query()

    def numbers(self) -> list[Any]:
        """Wait for the copy and return the numbers."""
        self._event.synchronize()
        numbers = list(self._memory.tolist())
        self._free.append(self)
        return numbers


class CpuNumbers:
    """Numbers of a CPU tensor, with the interface of ``HostCopy``."""

    def __init__(self, value: Tensor) -> None:
        self._numbers = list(value.detach().reshape(-1).tolist())

    def arrived(self) -> bool:
        """Return True."""
        return True

    def numbers(self) -> list[Any]:
        """Return the numbers."""
        return self._numbers


class HostCopies:
    """Pool of copies to the host; a copy that was read is used again for a tensor of the same size and dtype.

    An event is reused, never destroyed, because destroying one can wait for the device.
    """

    def __init__(self, event: Callable[[], DeviceEvent], memory: HostMemory) -> None:
        self._event = event
        self._memory = memory
        self._free: dict[tuple[int, torch.dtype], list[HostCopy]] = {}

    def begin(self, value: Tensor) -> HostCopy:
        """Begin to copy a tensor to the host."""
        free = self._free.setdefault((value.numel(), value.dtype), [])
        copy = free.pop() if free else HostCopy(self._event(), self._memory(value.numel(), value.dtype), free)
        copy.begin(value)
        return copy


@cache
def host_copies(device: torch.device) -> HostCopies | None:
    """Return the pool of copies for a GPU; None for a CPU, which needs no copies."""
    return HostCopies(torch.cuda.Event, _pinned) if device.type == "cuda" else None


def begin_copy(value: Tensor, copies: HostCopies | None) -> HostCopy | CpuNumbers:
    """Begin to copy a tensor to the host; without ``copies`` it is on the CPU and is read at once."""
    return CpuNumbers(value) if copies is None else copies.begin(value)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor on the device, without waiting for work queued there."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    # A copy from memory that is not pinned would wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _pinned(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype, pin_memory=True)
