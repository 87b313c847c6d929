"""Reads the cores of this machine: how many there are, how many this process may use, and how busy they are.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """The cores of a machine."""

    model: str = ""
    physical: int | None = None
    logical: int = 1
    usable: int = 1
    """Logical cores that this process may use: CPU affinity and the container's quota."""


@dataclass(frozen=True, kw_only=True)
class CoreTimes:
    """Time of all cores together since boot, in clock ticks."""

    total: int
    busy: int
    stolen: int
    """Taken by other guests of the same host."""


def read_cpus() -> Cpus:
    """Return the cores of this machine."""
    # Threads of one core name each other.
    siblings = {_read(path) for path in TOPOLOGY.glob("cpu[0-9]*/topology/thread_siblings_list")}
    return Cpus(
        model=_model(_read(PROC / "cpuinfo")) or platform.processor() or platform.machine(),
        physical=len(siblings) or None,
        logical=os.cpu_count() or 1,
        usable=read_usable_cores(),
    )


def read_usable_cores() -> int:
    """Return how many logical cores this process may use."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable_cores(affinity, _read(CGROUP / "cpu.max"))


def usable_cores(affinity: int, cpu_max: str) -> int:
    """Cores that this process gets: its affinity, cut by a container's quota (``cpu.max``: quota and period in µs)."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, min(affinity, -(-int(quota) // int(period))))
    return affinity


def read_core_times(proc: Path = PROC) -> CoreTimes | None:
    """Return what the cores have done since boot; None where it is not told."""
    return parse_core_times(_read(proc / "stat"))


def parse_core_times(stat: str) -> CoreTimes | None:
    """Read the first line of ``/proc/stat``: user nice system idle iowait irq softirq steal guest guest_nice."""
    words = stat.split("\n", 1)[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    fields = [int(word) for word in words[1:9]]  # guest time is part of user time
    total = sum(fields)
    return CoreTimes(total=total, busy=total - fields[3] - fields[4], stolen=fields[7])


def load_average() -> tuple[float, float, float] | None:
    """Return the runnable processes on average over 1, 5 and 15 minutes; None where it is not told."""
    try:
        return os.getloadavg()
    except OSError:
        return None


def _model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return " ".join(value.split())
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
