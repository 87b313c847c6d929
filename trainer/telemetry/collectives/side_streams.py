"""Collectives that are issued on a GPU's further streams, as FSDP's are, and the waits of the training stream for them.

Such a call, and the wait within its own stream, blocks nothing else. The training stream waits where it is told to wait
for an event that was recorded behind the collective; ``Stream.wait_stream`` and ``wait_event`` do it by that, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from trainer.telemetry.collectives.readings import Call


class SideStreams:
    """Newest collective of each stream, and of each event that was recorded behind one.

    Args:
        current: Return the handle of the current stream of the rank's GPU.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self._current = current
        self._training = current()
        self._newest: dict[int, Call] = {}
        self._events: WeakKeyDictionary[Any, Call] = WeakKeyDictionary()

    def begin_step(self) -> None:
        """Take the current stream as that of the training."""
        self._training = self._current()
        self._newest.clear()

    def is_elsewhere(self) -> bool:
        """Whether the current stream is another one than the training's."""
        return self._current() != self._training

    def issued(self, call: Call) -> None:
        """A collective was called; on the training's own stream it needs no event."""
        stream = self._current()
        if stream != self._training:
            self._newest[stream] = call

    def recorded(self, event: Any, stream: Any) -> None:
        """An event was recorded on a stream, None for the current one."""
        call = self._newest.get(self._current() if stream is None else stream.cuda_stream)
        if call is not None:
            self._events[event] = call
        elif event in self._events:
            del self._events[event]

    def awaited(self, event: Any, stream: Any) -> Call | None:
        """Return the collective for which a stream is told to wait; None unless it is the training's."""
        handle = self._current() if stream is None else stream.cuda_stream
        return self._events.get(event) if handle == self._training == self._current() else None
