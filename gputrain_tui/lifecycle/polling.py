"""Wait for a state of files or processes that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_QUERY_INTERVAL_S, MAX_QUERY_INTERVAL_S = 1.0, 15.0
"""First and longest time between two queries to a scheduler; it doubles, to spare the one controller of a cluster."""


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds, which is evaluated 20 times a second; return whether it does in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
