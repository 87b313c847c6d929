"""Wait for a state of files or processes that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds, which is evaluated 20 times a second; return whether it does in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
