"""Wait until a condition holds, for example in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 120.0
"""Time-out far above any duration on a busy machine: it means a hang."""


def until(happened: Callable[[], Any], condition: str = "it", limit_s: float = LIMIT_S) -> Any:
    """Wait until a condition holds and return its value."""
    deadline = time.monotonic() + limit_s
    while not (value := happened()):
        assert time.monotonic() < deadline, f"{condition} did not come true"
        time.sleep(0.01)
    return value
