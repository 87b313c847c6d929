"""Network connections of this process, including those that libraries have opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def own_connections() -> Iterator[socket.socket]:
    """Yield each IP socket of this process, on a duplicated descriptor that is closed afterwards."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection
