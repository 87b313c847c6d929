"""Waits for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 120.0
"""Far above what anything takes on a busy machine: what takes so long hangs."""


def until(happened: Callable[[], Any], what: str = "it", limit_s: float = LIMIT_S) -> Any:
    """Wait until a condition holds and return its value."""
    deadline = time.monotonic() + limit_s
    while not (value := happened()):
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.01)
    return value
