"""Files of ``/proc`` and ``/sys``; one that is absent or forbidden reads as empty.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_text(path: Path) -> str:
    """Return the content of a file as text; empty if it cannot be read."""
    return read_bytes(path).decode("utf-8", "replace")


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if it has none, such as ``max``, or cannot be read."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
