"""Wait for a state of files or processes that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout_s: float, *, interval_s: float = 0.05) -> bool:
    """Wait until a condition holds, which is evaluated every ``interval_s``; return whether it does in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_s)
    return True
