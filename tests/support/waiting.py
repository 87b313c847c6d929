"""Wait until a condition holds, for example in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
"""Time-out far above any duration on a busy machine: it means a hang."""


def until(happened: Callable[[], Any], condition: str = "it", limit_s: float = LIMIT_S) -> Any:
    """Wait until a condition holds and return its value; looking takes at most a third of a core."""
    deadline = (begun := time.monotonic()) + limit_s
    while not (value := happened()):
        looked = time.monotonic()
        assert looked < deadline, f"{condition} did not come true"
        time.sleep(max(0.01, 2 * (looked - begun)))
        begun = time.monotonic()
    return value


def written(path: Path) -> str:
    """Wait until a file has been written, and return its text; of a file that is there nothing may be written yet."""
    return str(until(lambda: path.exists() and path.read_text(), f"the text of {path}"))
