"""Prints into a supervisor's log, which may be on a full disk."""

from __future__ import annotations

import os
from contextlib import suppress


def log_line(text: str) -> None:
    """Print a line to standard error, unbuffered; one that cannot be written is lost and raises nothing."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
