"""Finds the network connections that this process holds, whoever in it has made them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def own_connections() -> Iterator[socket.socket]:
    """Yield a socket for each connection over IP, on a descriptor of its own that is closed afterwards."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection
