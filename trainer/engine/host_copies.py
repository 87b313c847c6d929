"""Brings single numbers of a GPU to the host without making the training wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """What tells when a device has come to a place in its queue, as ``torch.cuda.Event`` does."""

    def record(self) -> Any:
        """Mark the place: after all that was asked of the device so far."""

    def query(self) -> bool:
        """Return whether the device has got there; never waits."""

    def synchronize(self) -> Any:
        """Wait until it has."""


class HostCopy:
    """One number on its way; pinned memory and event serve the next number once this one has been read."""

    def __init__(self, event: DeviceEvent, *, pinned: bool) -> None:
        self._event = event
        self._number = torch.empty((), dtype=torch.float64, pin_memory=pinned)

    def begin(self, value: Tensor) -> None:
        """Queue the copy of a tensor [] behind the work that computes it."""
        self._number.copy_(value.detach().to(torch.float64).reshape(()), non_blocking=True)
        self._event.record()

    def arrived(self) -> bool:
        """Return whether it can be read without waiting."""
        return self._event.query()

    def read(self) -> float:
        """Return the number; waits until it is here."""
        self._event.synchronize()
        return float(self._number)


class HostCopies:
    """Begins copies to the host, and keeps those that were read for further numbers.

    An event is reused, never destroyed, because destroying one can wait for the device.
    """

    def __init__(self, event: Callable[[], DeviceEvent], *, pinned: bool) -> None:
        self._event = event
        self._pinned = pinned
        self._free: list[HostCopy] = []

    def begin(self, value: Tensor) -> HostCopy:
        """Begin to copy a tensor []."""
        copy = self._free.pop() if self._free else HostCopy(self._event(), pinned=self._pinned)
        copy.begin(value)
        return copy

    def release(self, copy: HostCopy) -> None:
        """Take back a copy that has been read."""
        self._free.append(copy)


def host_copies(device: torch.device) -> HostCopies | None:
    """Return what brings numbers from this device; None for a CPU, whose numbers are here already."""
    return HostCopies(torch.cuda.Event, pinned=True) if device.type == "cuda" else None
