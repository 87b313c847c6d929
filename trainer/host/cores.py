"""Cores of this machine: their number, the number that this process may use, and their use.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from trainer.host.proc_files import CGROUP, PROC, read_text

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
    """Steal time: taken by other guests of the same host."""


def read_cpus() -> Cpus:
    """Return the cores of this machine."""
    # The hardware threads of one core list the same siblings.
    siblings = {read_text(path) for path in TOPOLOGY.glob("cpu[0-9]*/topology/thread_siblings_list")}
    return Cpus(
        model=_model(read_text(PROC / "cpuinfo")) or platform.processor() or platform.machine(),
        physical=len(siblings) or None,
        logical=os.cpu_count() or 1,
        usable=usable_cores(),
    )


def usable_cores(local_ranks: int = 1) -> int:
    """Return the number of cores for each of ``local_ranks`` ranks on this node.

    More threads than that share cores, or are throttled together for the rest of the quota's period.
    """
    try:
        own = len(os.sched_getaffinity(0))
        parent = len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):  # not Linux, or a parent that has ended
        own = parent = os.cpu_count() or 1
    return share_of_cores(own=own, parent=parent, quota=cpu_quota(), local_ranks=local_ranks)


def share_of_cores(*, own: int, parent: int, quota: float | None, local_ranks: int) -> int:
    """Divide a node's cores among its ranks; each gets one at least.

    Args:
        own: cores in this process's affinity mask.
        parent: cores in its parent's mask. A launcher that binds each rank, as ``srun`` and ``mpirun`` do, has a larger
            mask than the rank, whose own cores are then not shared with other ranks.
        quota: cores of CPU time that the ranks of the node may use together; None without a limit.
        local_ranks: ranks on this node.
    """
    cores = own if own < parent else own // local_ranks
    if quota is not None:
        cores = min(cores, int(quota / local_ranks))
    return max(1, cores)


def cpu_quota(proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its ancestors, in cores; None without a limit."""
    limits: list[float] = []
    for line in read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = cgroup
        elif "cpu" in controllers.split(","):
            mount = cgroup / "cpu"
        else:
            continue
        # In a container the path may be the host's, of which only the mount's root is visible.
        folder = mount / path.strip("/")
        limits += [limit for place in (folder, *folder.parents) if (limit := _limit(place)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Return the quota of one cgroup, of version 2 or 1, in cores: both have it as microseconds per period."""
    words = read_text(folder / "cpu.max").split()
    quota, period = words or [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None  # "max", -1: no limit


def read_core_times(proc: Path = PROC) -> CoreTimes | None:
    """Return the total, busy and stolen time of all cores since boot; None if ``/proc/stat`` is unreadable."""
    return parse_core_times(read_text(proc / "stat"))


def parse_core_times(stat: str) -> CoreTimes | None:
    """Parse the first line of ``/proc/stat``: user nice system idle iowait irq softirq steal guest guest_nice."""
    words = stat.split("\n", 1)[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    fields = [int(word) for word in words[1:9]]  # guest time is part of user time
    total = sum(fields)
    return CoreTimes(total=total, busy=total - fields[3] - fields[4], stolen=fields[7])


def load_average() -> tuple[float, float, float] | None:
    """Return the load averages over 1, 5 and 15 minutes; None if they are unknown."""
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
