"""One deadline for the first answers of hosts that are asked in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_ANSWER_S = 5.0
"""Time in which a host must answer once half of all hosts have: hosts that are up need one second, and ssh gives up
after as long for each of a host's addresses."""
SLOWEST_MULTIPLE = 3.0
"""Where all hosts are slow, as by their start-up files or a busy machine, the time is this multiple of the slowest."""
MIN_ANSWERS = 3
"""Fewer answers do not tell how long a login takes here: one of two hosts may need a home folder mounted first."""


class FirstAnswers:
    """Times of the first answers, from several threads."""

    def __init__(self, hosts: int, *, now: Callable[[], float] = time.monotonic) -> None:
        """Begin, for a number of hosts."""
        self._hosts = hosts
        self._now = now
        self._took_s: list[float] = []

    def add(self, began: float) -> None:
        """Note the first answer of a host that was asked at ``began``, monotonic seconds."""
        self._took_s.append(self._now() - began)

    def left_s(self, began: float) -> float:
        """Return the seconds left to a host asked at ``began``; infinite until enough hosts have answered."""
        took_s = list(self._took_s)
        if len(took_s) < max(MIN_ANSWERS, self._hosts / 2):
            return float("inf")
        return began + max(FIRST_ANSWER_S, SLOWEST_MULTIPLE * max(took_s)) - self._now()
