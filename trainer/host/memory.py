"""Reads the main memory of this machine and of its container, and how often it ran out.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.host.proc_files import CGROUP, PROC, read_number, read_text


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The main memory of a machine."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    """Allocatable without swapping."""

    @property
    def used_bytes(self) -> int | None:
        """Memory that the kernel cannot reclaim at once."""
        if self.total_bytes is None or self.available_bytes is None:
            return None
        return self.total_bytes - self.available_bytes


def read_memory(proc: Path = PROC) -> Memory:
    """Return the memory of this machine."""
    return memory_from(read_text(proc / "meminfo"))


def read_swap_bytes(proc: Path = PROC) -> int | None:
    """Return the size of the swap space of this machine, used or not; None where that is unknown."""
    return _bytes_of(read_text(proc / "meminfo"), "SwapTotal")


def read_container_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return what this container may take of the machine's memory; None without a limit."""
    return read_number(cgroup / "memory.max")


def read_container_memory(cgroup: Path = CGROUP) -> Memory | None:
    """Return the memory that this container may use; None without a limit."""
    limit, used = read_container_limit_bytes(cgroup), read_number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The kernel drops pages of files before it kills a process.
    lines = (line.split() for line in read_text(cgroup / "memory.stat").splitlines())
    cached = sum(int(size) for name, size in lines if name in ("active_file", "inactive_file"))
    return Memory(total_bytes=limit, available_bytes=max(0, limit - used + cached))


def memory_from(meminfo: str) -> Memory:
    """Read ``/proc/meminfo``."""
    return Memory(
        total_bytes=_bytes_of(meminfo, "MemTotal"),
        available_bytes=_bytes_of(meminfo, "MemAvailable"),
    )


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory, on the machine and in this container."""
    lines = f"{read_text(PROC / 'vmstat')}\n{read_text(CGROUP / 'memory.events')}".splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _bytes_of(meminfo: str, name: str) -> int | None:
    """Return a size of ``/proc/meminfo``, which counts in KiB."""
    for line in meminfo.splitlines():
        key, _, words = line.partition(":")
        if key == name and words.split():
            return int(words.split()[0]) * 1024
    return None
