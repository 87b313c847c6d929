"""Clocks that do not make training wait: the host's for CPU ranks, CUDA events for GPU ranks.

A mark is a point in time on the rank's own timeline. On the host it is known at once; on a GPU it lies in the
future, when the device has done what was queued before it, so readers ask ``ready`` first and never wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any
"""A reading of the host's clock, or a recorded CUDA event: opaque to everyone but its clock."""

Scalar = Tensor | float | None


class Clock(Protocol):
    """Marks points in time and fetches numbers, both without waiting."""

    def mark(self, *, waits: bool = True) -> Mark:
        """Return a mark for now: after all that was asked of the device so far.

        Args:
            waits: Whether to read how long the training's thread has waited for a core; a mark without that repeats
                the reading of the last one that had it.
        """
        ...

    def ready(self, marks: Iterable[Mark]) -> bool:
        """Tell whether all marks have been reached."""
        ...

    def laps_ms(self, marks: Sequence[Mark]) -> list[float]:
        """Return the milliseconds between each mark and the next; all are ready."""
        ...

    def waits_ms(self, marks: Sequence[Mark]) -> list[float] | None:
        """Return the milliseconds between each mark and the next in which the training's thread had no core.

        That is, it was ready to run and another had the core; None where nobody counts it.
        """
        ...

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks that are ready."""
        ...

    def release(self, marks: Sequence[Mark]) -> None:
        """Say that these marks are not read any more."""
        ...

    def fetch(self, values: Sequence[Scalar]) -> Callable[[], list[float | None]]:
        """Start bringing numbers to the host; the result may be called once a later mark is ready."""
        ...


class HostClock:
    """The clock of a CPU rank: everything has happened by the time it is asked.

    A mark is the time and the count of waits for a core, both in seconds.

    Args:
        clock: Seconds.
        waits: Seconds that the training's thread has waited for a core; None where nobody counts them.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, waits: Callable[[], float] | None = None
    ) -> None:
        self._clock = clock
        self._waits = waits
        self._waited = 0.0
        """The count at the last mark that read it."""

    def mark(self, *, waits: bool = True) -> tuple[float, float]:
        """Return now and the count of waits."""
        now = self._clock()
        if waits and self._waits is not None:
            self._waited = self._waits()
        return now, self._waited

    def waits_ms(self, marks: Sequence[tuple[float, float]]) -> list[float] | None:
        """Return the milliseconds without a core between each mark and the next; None where nobody counts them."""
        if self._waits is None:
            return None
        return [(end - start) * 1e3 for (_, start), (_, end) in pairwise(marks)]

    def ready(self, marks: Iterable[Mark]) -> bool:
        """Tell that they are."""
        return True

    def laps_ms(self, marks: Sequence[tuple[float, float]]) -> list[float]:
        """Return the milliseconds between each mark and the next."""
        return [(end - start) * 1e3 for (start, _), (end, _) in pairwise(marks)]

    def elapsed_ms(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        """Return the milliseconds between two marks."""
        return (end[0] - start[0]) * 1e3

    def release(self, marks: Sequence[Mark]) -> None:
        """Forget nothing: a number needs no returning."""

    def fetch(self, values: Sequence[Scalar]) -> Callable[[], list[float | None]]:
        """Read the numbers now; they are in the host's memory."""
        numbers = [value.item() if isinstance(value, Tensor) else value for value in values]
        return lambda: numbers


class CudaClock:
    """The clock of a GPU rank: pooled events on the current stream, numbers copied to pinned memory.

    Laps are measured on the device's timeline, on which a wait for data shows only as far as it left the device
    idle. Nothing here waits for the device; an event is reused, never destroyed, since destroying one can block.
    """

    def __init__(
        self, device: torch.device, event: Callable[[], Any] | None = None, stream: Callable[[], Any] | None = None
    ) -> None:
        self._device = device
        # Of this device, which need not be the current one: scripts may never have called ``set_device``.
        self._stream = stream or (lambda: torch.cuda.current_stream(device))
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events: list[Any] = []
        self._pinned: list[Tensor] = []

    def mark(self, *, waits: bool = True) -> Any:
        """Record an event on the device's current stream."""
        try:
            event = self._events.pop()
        except IndexError:  # asked for and not foreseen: a callback on another thread may take the last one
            event = self._event()
        event.record(self._stream())
        return event

    def ready(self, marks: Iterable[Any]) -> bool:
        """Ask each event whether the device has reached it."""
        return all(mark.query() for mark in marks)

    def laps_ms(self, marks: Sequence[Any]) -> list[float]:
        """Return the device's milliseconds between each event and the next."""
        return [start.elapsed_time(end) for start, end in pairwise(marks)]

    def waits_ms(self, marks: Sequence[Any]) -> None:
        """Return None: the device's time is not the thread's."""
        return

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the device's milliseconds between two events."""
        milliseconds: float = start.elapsed_time(end)
        return milliseconds

    def release(self, marks: Sequence[Any]) -> None:
        """Put events back into the pool."""
        self._events.extend(marks)

    def fetch(self, values: Sequence[Scalar]) -> Callable[[], list[float | None]]:
        """Queue one copy of all device numbers behind the work that computes them."""
        on_device = [isinstance(value, Tensor) and value.device.type == self._device.type for value in values]
        queued = [value for value, there in zip(values, on_device, strict=True) if there and isinstance(value, Tensor)]
        numbers = [
            None if there else float(value.detach()) if isinstance(value, Tensor) else value
            for value, there in zip(values, on_device, strict=True)
        ]
        if not queued:
            return lambda: numbers
        pinned = self._take_pinned(len(queued))
        stacked = torch.stack([value.detach().to(self._device, torch.float32, True).reshape(()) for value in queued])
        pinned[: len(queued)].copy_(stacked, non_blocking=True)

        def read() -> list[float | None]:
            arrived = iter(pinned.tolist())
            self._pinned.append(pinned)
            return [next(arrived) if there else number for number, there in zip(numbers, on_device, strict=True)]

        return read

    def _take_pinned(self, size: int) -> Tensor:
        while self._pinned:
            pinned = self._pinned.pop()
            if pinned.numel() >= size:
                return pinned
        return torch.empty(max(4, size), dtype=torch.float32, pin_memory=self._device.type == "cuda")
