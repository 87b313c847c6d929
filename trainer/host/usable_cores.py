"""Counts the cores that a rank may use: those of its affinity mask, within the quota of its cgroup.

More threads than that take turns on a core, or are all held back for the rest of a quota's period.
"""

from __future__ import annotations

import os
from pathlib import Path


def cores_per_rank(local_ranks: int) -> int:
    """Return how many cores one of the ranks of this node may use.

    Args:
        local_ranks: ranks on this node.
    """
    try:
        own = len(os.sched_getaffinity(0))
        around = len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):  # not Linux, or a parent that has ended
        own = around = os.cpu_count() or 1
    return share_of_cores(own=own, around=around, quota=cpu_quota(), local_ranks=local_ranks)


def share_of_cores(*, own: int, around: int, quota: float | None, local_ranks: int) -> int:
    """Divide a node's cores among its ranks; each gets one at least.

    Args:
        own: cores of this process's affinity mask.
        around: those of its parent's. A launcher that binds each rank, as ``srun`` and ``mpirun`` do, has a larger
            mask itself, and the rank's own is not shared with others.
        quota: cores that the ranks of the node may use together, at any time; None without a limit.
        local_ranks: ranks on this node.
    """
    cores = own if own < around else own // local_ranks
    if quota is not None:
        cores = min(cores, int(quota / local_ranks))
    return max(1, cores)


def cpu_quota(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that this process's cgroup, or one around it, may use at most; None without a limit."""
    limits: list[float] = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = cgroup
        elif "cpu" in controllers.split(","):
            mount = cgroup / "cpu"
        else:
            continue
        # In a container the path may be the host's, of which only the mount's root is to be seen.
        folder = mount / path.strip("/")
        limits += [limit for place in (folder, *folder.parents) if (limit := _limit(place)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Read the quota of one cgroup, of version 2 or 1; both are microseconds of every period's."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max" is no limit
        return None
