"""Counts the processes that the kernel killed for want of memory."""

from __future__ import annotations

from pathlib import Path

SOURCES = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
"""Of the machine, and of this container's limit."""


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory, here and since it started."""
    return sum(_count(source) for source in SOURCES)


def _count(source: Path) -> int:
    try:
        text = source.read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))
