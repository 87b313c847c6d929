"""Lets all ranks act at the same update on what only a clock or a person decides: stopping, and saving by time.

One collective of a few bytes about every half second. It is begun after one update and looked at after the next, so
that a GPU's queue never runs empty for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Begin = Callable[[Sequence[int]], Callable[[], list[int]]]
"""Begins to take the maximum of each number over the ranks; the result of a call is waited for only then."""


@dataclass(frozen=True, kw_only=True)
class LoopRequests:
    """What one rank wants, or all of them have agreed on."""

    stop: bool = False
    """Somebody asked this rank to stop."""
    end: bool = False
    """The time for training is over."""
    save: bool = False
    """A checkpoint is due by the clock."""


NONE = LoopRequests()


class Agreement:
    """One rank's part in the agreements; every rank calls ``after`` for the same updates."""

    interval_s = 0.5
    """Time between two agreements, roughly: they are due by number of updates, which all ranks count alike."""

    def __init__(
        self,
        begin: Begin,
        requests: Callable[[], LoopRequests],
        *,
        leads: bool,
        first_update: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Agree for the first time after the first update.

        Args:
            begin: the collective.
            requests: asked for when an agreement begins.
            leads: whether this rank says when the next agreement is due; one does.
            first_update: updates done before, when a training resumes.
            now: seconds.
        """
        self._begin = begin
        self._requests = requests
        self._leads = leads
        self._now = now
        self._due = first_update + 1
        self._last_update, self._last_time = first_update, now()
        self._interval = 1
        self._pending: Callable[[], list[int]] | None = None
        self._afresh = False
        """Whether what is pending says nothing about when the next agreement is due."""

    def after(self, update: int) -> LoopRequests:
        """Return what has been agreed on by now; what it says holds on every rank after this very update."""
        agreed = NONE
        if self._pending is not None:
            stop, end, save, interval = self._pending()
            self._pending = None
            agreed = LoopRequests(stop=bool(stop), end=bool(end), save=bool(save))
            if not self._afresh:
                self._due = self._last_update + interval
        if update >= self._due:
            self._afresh = False
            mine = self._requests()
            self._pending = self._begin([mine.stop, mine.end, mine.save, self._next_interval(update)])
        return agreed

    def soon(self, update: int) -> None:
        """Agree after the next update, because updates will take another time than they did."""
        self._interval, self._due, self._afresh = 1, update + 1, True
        self._last_update, self._last_time = update, self._now()

    def close(self) -> None:
        """Wait for what has been begun: the group cannot be left in the middle of it."""
        if self._pending is not None:
            self._pending()
            self._pending = None

    def _next_interval(self, update: int) -> int:
        now = self._now()
        seconds = max((now - self._last_time) / max(update - self._last_update, 1), 1e-6)
        self._last_update, self._last_time = update, now
        # Growing step by step: one fast update does not say that all are.
        self._interval = max(1, min(int(self.interval_s / seconds), 2 * self._interval))
        return self._interval if self._leads else 0
