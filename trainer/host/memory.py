"""Main memory of this machine and of its container, the kernel's out-of-memory kills, and settings of malloc.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.host.proc_files import CGROUP, PROC, read_number, read_text

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
MALLOC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables with which a user configures malloc or replaces it."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The main memory of a machine."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    """Memory that can be allocated without swapping."""

    @property
    def used_bytes(self) -> int | None:
        """Memory that the kernel cannot reclaim at once."""
        if self.total_bytes is None or self.available_bytes is None:
            return None
        return self.total_bytes - self.available_bytes


def read_memory(proc: Path = PROC) -> Memory:
    """Return the memory of this machine."""
    sizes = _meminfo(proc)
    return Memory(total_bytes=sizes.get("MemTotal"), available_bytes=sizes.get("MemAvailable"))


def read_swap_bytes(proc: Path = PROC) -> int | None:
    """Return the size of the swap space of this machine, used or not; None if it is unknown."""
    return _meminfo(proc).get("SwapTotal")


def _meminfo(proc: Path) -> dict[str, int]:
    """Return the sizes in ``/proc/meminfo``, which has KiB, in bytes."""
    entries = (line.partition(":") for line in read_text(proc / "meminfo").splitlines())
    return {name: int(size.split()[0]) * 1024 for name, _, size in entries if size.split()}


def read_container_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the memory limit of this container, bytes; None without one."""
    return read_number(cgroup / "memory.max")


def read_container_memory(cgroup: Path = CGROUP) -> Memory | None:
    """Return the memory that this container may use; None without a limit."""
    limit, used = read_container_limit_bytes(cgroup), read_number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The page cache counts as available: the kernel reclaims it before it kills a process.
    lines = (line.split() for line in read_text(cgroup / "memory.stat").splitlines())
    cached = sum(int(size) for name, size in lines if name in ("active_file", "inactive_file"))
    return Memory(total_bytes=limit, available_bytes=max(0, limit - used + cached))


def read_usable_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Memory:
    """Return the memory of this container if it has a limit, else that of the machine."""
    return read_container_memory(cgroup) or read_memory(proc)


def oom_kills() -> int:
    """Return the number of out-of-memory kills on the machine and in this container."""
    return _oom_kills(PROC / "vmstat") + _oom_kills(CGROUP / "memory.events")


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """Control group (cgroup) of this process that may have a memory limit, such as a Slurm job's."""

    folder: Path
    """Its folder below ``/sys/fs/cgroup``."""
    root: Path
    """Folder of the outermost group that is visible to this process."""

    def oom_kills(self) -> int:
        """Return the number of out-of-memory kills in this group."""
        return max(_oom_kills(self.folder / name) for name in ("memory.oom_control", "memory.events"))

    def limit(self) -> tuple[int, Path] | None:
        """Return the smallest limit of the group and its ancestors, bytes, and the group that has it; None without one.

        Of equal limits that of the outer group counts, which more processes share.
        """
        limits = []
        folder = self.folder
        while folder.is_relative_to(self.root):
            read = (read_number(folder / name) for name in ("memory.limit_in_bytes", "memory.max"))
            limits += [(limit, len(folder.parts), folder) for limit in read if limit is not None]
            folder = folder.parent
        no_limit_bytes = 1 << 60  # cgroups of version 1 show a number near 2^63 where there is no limit
        limit, _, holder = min(limits, default=(no_limit_bytes, 0, self.root))
        return (limit, holder) if limit < no_limit_bytes else None


def read_memory_group(proc: Path = PROC, cgroup: Path = CGROUP, *, pid: int | None = None) -> MemoryGroup | None:
    """Return the memory cgroup of a process, by default this one, of version 1 or 2; None if it is not visible here."""
    for line in read_text(proc / ("self" if pid is None else str(pid)) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("memory", ""):
            continue
        for root in (cgroup / "memory",) if controllers else (cgroup, cgroup / "unified"):
            folder = root / path.lstrip("/")
            if (folder / "memory.oom_control").exists() or (folder / "memory.events").exists():
                return MemoryGroup(folder=folder, root=root)
    return None


def _oom_kills(file: Path) -> int:
    return sum(int(line.split()[1]) for line in read_text(file).splitlines() if line.startswith("oom_kill "))


def keep_freed_memory() -> bool:
    """Raise both thresholds of glibc's malloc, unless a user has configured it; return whether they were raised.

    By default a step's large blocks go back to the kernel, and are faulted in again at the next step.
    """
    trim_bytes = 1 << 29  # free memory kept at the end of the heap: more than the temporaries of a step on CPU ranks
    mmap_bytes = 1 << 25  # size from which a block gets its own mapping; the maximum that glibc allows
    return _set_malloc({M_MMAP_THRESHOLD: mmap_bytes, M_TRIM_THRESHOLD: trim_bytes})


def return_freed_memory() -> bool:
    """Have glibc's malloc return each large block to the kernel, unless a user has configured it; return whether.

    By default it keeps some, between which others are allocated: where a model's blocks are gathered and freed all the
    time, the heap then grows to several times what is in use.
    """
    mmap_bytes = 1 << 20  # size from which a block gets its own mapping; once set, glibc does not raise it
    return _set_malloc({M_MMAP_THRESHOLD: mmap_bytes})


def _set_malloc(settings: Mapping[int, int]) -> bool:
    if any(name in os.environ for name in MALLOC_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(name, value) for name, value in settings.items())
