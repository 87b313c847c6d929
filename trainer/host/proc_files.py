"""Reads files of the kernel; one that is absent or forbidden is empty.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_text(path: Path) -> str:
    """Return the content of a file as text."""
    return read_bytes(path).decode("utf-8", "replace")


def read_number(path: Path) -> int | None:
    """Return the number that a file holds; None where it holds none, such as ``max``."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
