"""Reads the main memory of this machine and of its container, and how often it ran out.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The main memory of a machine."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    """What could be allocated without swapping."""

    @property
    def used_bytes(self) -> int | None:
        """What the kernel cannot give back at once."""
        if self.total_bytes is None or self.available_bytes is None:
            return None
        return self.total_bytes - self.available_bytes


def read_memory(proc: Path = PROC) -> Memory:
    """Return the memory of this machine."""
    return memory_from(_read(proc / "meminfo"))


def read_swap_bytes(proc: Path = PROC) -> int | None:
    """Return the size of the swap space of this machine, used or not; None where it is not told."""
    return _bytes_of(_read(proc / "meminfo"), "SwapTotal")


def read_container_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return what this container may take of the machine's memory; None without a limit."""
    text = _read(cgroup / "memory.max").strip()
    return int(text) if text.isdecimal() else None


def memory_from(meminfo: str) -> Memory:
    """Read ``/proc/meminfo``."""
    return Memory(
        total_bytes=_bytes_of(meminfo, "MemTotal"),
        available_bytes=_bytes_of(meminfo, "MemAvailable"),
    )


def oom_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return how many processes the kernel has killed for want of memory, on the machine and in this container."""
    lines = f"{_read(proc / 'vmstat')}\n{_read(cgroup / 'memory.events')}".splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _bytes_of(meminfo: str, name: str) -> int | None:
    """Return a size of ``/proc/meminfo``, which counts in KiB."""
    for line in meminfo.splitlines():
        key, _, words = line.partition(":")
        if key == name and words.split():
            return int(words.split()[0]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
