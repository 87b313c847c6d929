"""Brings a few numbers of a GPU to the host without making the training wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

HostMemory = Callable[[int, torch.dtype], Tensor]
"""Allocates ``[elements]`` of a type where a device can copy to without the host's help."""


class DeviceEvent(Protocol):
    """What tells when a device has come to a place in its queue, as ``torch.cuda.Event`` does."""

    def record(self) -> Any:
        """Mark the place: after all that was asked of the device so far."""

    def query(self) -> bool:
        """Return whether the device has got there; never waits."""

    def synchronize(self) -> Any:
        """Wait until it has."""


class HostCopy:
    """Numbers on their way, to be read once; then memory and event serve further numbers."""

    def __init__(self, event: DeviceEvent, memory: Tensor, free: list[HostCopy]) -> None:
        self._event = event
        self._memory = memory
        self._free = free

    def begin(self, value: Tensor) -> None:
        """Queue the copy of a tensor behind the work that computes it."""
        self._memory.copy_(value.detach().reshape(-1), non_blocking=True)
        self._event.record()

    def arrived(self) -> bool:
        """Return whether they can be read without waiting."""
        return self._event.query()

    def numbers(self) -> list[Any]:
        """Return the numbers; waits until they are here."""
        self._event.synchronize()
        numbers = list(self._memory.tolist())
        self._free.append(self)
        return numbers


class NumbersHere:
    """Numbers of a CPU, in the place of a ``HostCopy``."""

    def __init__(self, value: Tensor) -> None:
        self._numbers = list(value.detach().reshape(-1).tolist())

    def arrived(self) -> bool:
        """Return True."""
        return True

    def numbers(self) -> list[Any]:
        """Return the numbers."""
        return self._numbers


class HostCopies:
    """Begins copies to the host, and keeps those that were read for further numbers.

    An event is reused, never destroyed, because destroying one can wait for the device.
    """

    def __init__(self, event: Callable[[], DeviceEvent], memory: HostMemory) -> None:
        self._event = event
        self._memory = memory
        self._free: dict[tuple[int, torch.dtype], list[HostCopy]] = {}

    def begin(self, value: Tensor) -> HostCopy:
        """Begin to copy a tensor."""
        free = self._free.setdefault((value.numel(), value.dtype), [])
        copy = free.pop() if free else HostCopy(self._event(), self._memory(value.numel(), value.dtype), free)
        copy.begin(value)
        return copy


@cache
def host_copies(device: torch.device) -> HostCopies | None:
    """Return what brings numbers from this device; None for a CPU, whose numbers are here already."""
    return HostCopies(torch.cuda.Event, _pinned) if device.type == "cuda" else None


def begin_copy(value: Tensor, copies: HostCopies | None) -> HostCopy | NumbersHere:
    """Begin to copy a tensor to the host, where it is not there already."""
    return NumbersHere(value) if copies is None else copies.begin(value)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers as a tensor on the device, int64, without waiting for what is queued there."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    # From memory that is not pinned the copy would wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _pinned(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype, pin_memory=True)
