"""Agreement of all ranks on the update after which they stop or save, as one rank's clock or the user requests.

It takes one collective of a few bytes about every half second, started after one update and read after the next, so
that a GPU's queue never runs empty for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MaxAsync = Callable[[Sequence[int]], Callable[[], list[int]]]
"""Starts an all-reduce of numbers by maximum; returns a function that waits for the result and returns it."""


@dataclass(frozen=True, kw_only=True)
class LoopRequests:
    """Requests to the training loop: those of one rank, or those agreed on by all."""

    stop: bool = False
    end: bool = False
    """``--stop-time`` is reached."""
    save: bool = False
    """One is due by the clock, or a number was not finite."""
    numbers: Sequence[int] = ()
    """Of ``ShareBalance``; agreed on is the maximum of each over the ranks."""


NONE = LoopRequests()


class Agreement:
    """One rank's side of the agreements; every rank calls ``after`` for the same updates."""

    interval_s = 0.5
    """Approximate time between two agreements; they are scheduled by number of updates, which all ranks count alike."""

    def __init__(
        self,
        begin: MaxAsync,
        requests: Callable[[], LoopRequests],
        *,
        leads: bool,
        first_update: int = 0,
        most_updates: int = 1 << 30,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin after ``first_update``. From one agreement to the next there are ``most_updates`` at most."""
        self._begin = begin
        self._requests = requests
        self._leads = leads
        self._now = now
        self._due = first_update + 1
        self._last_update, self._last_time = first_update, now()
        self._interval, self._most = 1, most_updates
        self._pending: Callable[[], list[int]] | None = None
        self._rescheduled = False
        """Whether ``reschedule`` set the next agreement, so that a pending result does not."""

    def after(self, update: int) -> LoopRequests:
        """Return the requests agreed on; every rank returns the same ones after the same update."""
        agreed = NONE
        if self._pending is not None:
            stop, end, save, interval, *numbers = self._pending()
            self._pending = None
            agreed = LoopRequests(stop=bool(stop), end=bool(end), save=bool(save), numbers=numbers)
            if not self._rescheduled:
                self._due = self._last_update + interval
        if update >= self._due:
            self._rescheduled = False
            own = self._requests()
            self._pending = self._begin([own.stop, own.end, own.save, self._next_interval(update), *own.numbers])
        return agreed

    def reschedule(self, update: int) -> None:
        """Schedule an agreement after the next update, because the duration of updates is about to change."""
        self._interval, self._due, self._rescheduled = 1, update + 1, True
        self._last_update, self._last_time = update, self._now()

    def close(self) -> None:
        """Wait for a pending collective, which must end before the process group is left."""
        if self._pending is not None:
            self._pending()
            self._pending = None

    def _next_interval(self, update: int) -> int:
        now = self._now()
        seconds = max((now - self._last_time) / max(update - self._last_update, 1), 1e-6)
        self._last_update, self._last_time = update, now
        # At most doubled: a single fast update does not show that all are.
        self._interval = max(1, min(int(self.interval_s / seconds), 2 * self._interval, self._most))
        return self._interval if self._leads else 0
