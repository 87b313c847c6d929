"""Clocks that do not synchronise: the host's for CPU ranks, CUDA events for GPU ranks.

A mark is a point in time on the rank's timeline. On the host it is known at once; on a GPU it is reached once the
device has done the work queued before it, so readers check ``ready`` first and never wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Mark = Any
"""Reading of the host's clock, or recorded CUDA event; opaque outside of its clock."""
Instant = Any
"""A mark without the run delay: a plain number on the host, since a step may have hundreds."""

Scalar = Tensor | float | None


class HostClock:
    """Clock of a CPU rank; a mark is ready at once: the time and the run delay, both in seconds.

    ``waits`` is the run delay of the training thread, how long it has waited for a core; None where the kernel does not
    count it. To read it takes 2 to 40 µs, and more on a virtual machine.
    """

    READ_SHARE = 1 / 500
    """Largest share of the time for which the run delay is read. Between two reads it counts to the phase at whose end
    it is read."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, waits: Callable[[], float] | None = None
    ) -> None:
        self.instant = self._clock = clock
        self._waits = waits or (lambda: 0.0)
        self.counts_waits = waits is not None
        self._waited = 0.0
        """Run delay when it was read last."""
        self.next_read_s = -math.inf if self.counts_waits else math.inf
        """Time from which it is read again."""

    @staticmethod
    def is_capturing() -> bool:
        """Return whether work is captured into a graph, where a mark has no time."""
        return False

    def enter_thread(self) -> None:
        """Prepare a thread other than the training thread to read marks."""

    def mark(self, *, waits: bool = True) -> tuple[float, float]:
        """Return a mark after all work that is queued on the device; without ``waits`` the run delay is not read."""
        now = self._clock()
        if waits and now >= self.next_read_s:
            self.read_delay_s(now)
        return now, self._waited

    def read_delay_s(self, now: float) -> float:
        """Read the run delay, which is due; return its growth since it was read last, seconds."""
        before, self._waited = self._waited, self._waits()
        read_s = self._clock()
        self.next_read_s = read_s + (read_s - now) / self.READ_SHARE
        return self._waited - before

    def waits_ms(self, marks: Sequence[Mark]) -> list[float] | None:
        """Return the milliseconds of run delay between each mark and the next; None where it is not counted."""
        if not self.counts_waits:
            return None
        return [(end - start) * 1e3 for (_, start), (_, end) in pairwise(marks)]

    def ready(self, marks: Iterable[Mark]) -> bool:
        """Return whether all marks are reached, which must be so before times between them are read."""
        return True

    def laps_ms(self, marks: Sequence[Mark]) -> list[float]:
        return [(end - start) * 1e3 for (start, _), (end, _) in pairwise(marks)]

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        return float(end[0] - start[0]) * 1e3

    def offsets_ms(self, start: Mark, instants: Iterable[Instant]) -> list[float]:
        """Return the milliseconds from a mark to each instant."""
        origin = start[0]
        return [(at - origin) * 1e3 for at in instants]

    def release(self, marks: Iterable[Mark]) -> None:
        """Put marks that are not read any more into the pool."""

    def memory_peak_bytes(self) -> int | None:
        """Return the peak memory of tensors on the device, without synchronising; torch does not count the host's."""
        return None

    def fetch(self, values: Sequence[Scalar]) -> Callable[[], list[float | None]]:
        """Start copying numbers to the host; call the result once a later mark is ready."""
        numbers = [value.item() if isinstance(value, Tensor) else value for value in values]
        return lambda: numbers


class CudaClock:
    """Clock of a GPU rank: pooled events on the current stream, numbers copied to pinned memory.

    Times are on the device's timeline: a wait for data shows only as far as the device was idle. Events are reused,
    never destroyed, since destroying one can synchronise.
    """

    def __init__(
        self,
        device: torch.device,
        event: Callable[[], Any] | None = None,
        stream: Callable[[], Any] | None = None,
        set_device: Callable[[torch.device], None] = torch.cuda.set_device,
        peak_bytes: Callable[[torch.device], int] = torch.cuda.max_memory_allocated,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self.is_capturing = is_capturing
        """Whether the current stream is captured into a graph, where a mark has no time."""
        self._device = device
        self._set_device = set_device
        self._peak_bytes = peak_bytes
        self._stream = stream or _current_stream(device)
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self.instant = self.mark
        self._events: list[Any] = []
        self._pinned: list[tuple[Tensor, ...]] = []
        """Numbers in page-locked memory, [] each, of the copies that were read."""

    def enter_thread(self) -> None:
        # A new thread has GPU 0, where its first query of an event would create a context of half a GiB in each rank.
        self._set_device(self._device)

    def mark(self, *, waits: bool = True) -> Any:
        try:
            event = self._events.pop()
        except IndexError:  # no check before: a callback on another thread may take the last one
            event = self._event()
        event.record(self._stream())
        return event

    def ready(self, marks: Iterable[Any]) -> bool:
        return all(mark.query() for mark in marks)

    def laps_ms(self, marks: Sequence[Any]) -> list[float]:
        return [start.elapsed_time(end) for start, end in pairwise(marks)]

    def waits_ms(self, marks: Sequence[Any]) -> list[float] | None:
        return None

    def elapsed_ms(self, start: Any, end: Any) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds

    def offsets_ms(self, start: Any, instants: Iterable[Any]) -> list[float]:
        return [start.elapsed_time(instant) for instant in instants]

    def release(self, marks: Iterable[Any]) -> None:
        self._events.extend(marks)

    def stream_handle(self) -> int:
        """Return the handle of the device's current stream."""
        return int(self._stream().cuda_stream)

    def memory_peak_bytes(self) -> int | None:
        return self._peak_bytes(self._device) or None

    def fetch(self, values: Sequence[Scalar]) -> Callable[[], list[float | None]]:
        """Start copying numbers, of which there are as many at each call."""
        on_device = [isinstance(value, Tensor) and value.device.type == self._device.type for value in values]
        pairs = list(zip(values, on_device, strict=True))
        numbers = [
            None if copied else float(value.detach()) if isinstance(value, Tensor) else value for value, copied in pairs
        ]
        if not any(on_device):
            return lambda: numbers
        pinned = self._pinned.pop() if self._pinned else self._new_pinned(len(values))
        for place, (value, copied) in zip(pinned, pairs, strict=True):
            if copied and isinstance(value, Tensor):
                place.copy_(value.detach().reshape(()), non_blocking=True)

        def read() -> list[float | None]:
            known = [
                place.item() if copied else number
                for place, copied, number in zip(pinned, on_device, numbers, strict=True)
            ]
            self._pinned.append(pinned)
            return known

        return read

    def _new_pinned(self, size: int) -> tuple[Tensor, ...]:
        return torch.empty(size, dtype=torch.float32, pin_memory=self._device.type == "cuda").unbind()


def is_capturing() -> bool:
    """Return whether the work of the current GPU, if one is in use, is captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _current_stream(device: torch.device) -> Callable[[], Any]:
    """Return a function that returns the current stream of a device, which need not be the current one.

    Scripts may never call ``set_device``. ``torch.cuda.current_stream`` takes twice as long as to record an event.
    """
    handle_of: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if handle_of is None or device.index is None:
        return lambda: torch.cuda.current_stream(device)
    streams: dict[int, Any] = {}

    def current() -> Any:
        handle = handle_of(device.index)
        stream = streams.get(handle)
        if stream is None:
            stream = streams[handle] = torch.cuda.current_stream(device)
        return stream

    return current


Clock = HostClock | CudaClock
"""Marks points in time, and fetches numbers, without synchronising."""
