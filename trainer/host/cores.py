"""Cores of this machine: their number, the number that this process may use, their use, and waits for one.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.host.cpu_cgroup import cpu_cgroup, cpu_quota
from trainer.host.proc_files import PROC, read_text
from trainer.host.processes import parse_wait_ns

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """The cores of a machine."""

    model: str = ""
    physical: int | None = None
    logical: int = 1
    usable: int = 1
    """Logical cores that this process may use: the least of affinity mask, cpuset and quota."""
    quota_cores: float | None = None
    """CPU quota of its cgroup; None without one."""
    cpuset_cores: int | None = None
    """Logical cores in the cpuset of its cgroup; None if that cannot be read."""

    @property
    def limit(self) -> str:
        """Limit by which not all logical cores are usable, in a few words; empty without one."""
        quota = self.quota_cores
        if quota is not None and quota < min(self.usable + 1, self.logical):
            return f"cpu quota of {quota:g} core{'s' * (quota != 1)}"
        if self.usable >= self.logical:
            return ""
        return "cpuset" if self.cpuset_cores == self.usable else "CPU affinity"


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
    entries = (line.partition(":") for line in read_text(PROC / "cpuinfo").splitlines())
    names = (" ".join(name.split()) for key, _, name in entries if key.strip() in ("model name", "Model", "cpu model"))
    model = next(names, "") or platform.processor() or platform.machine()
    return replace(usable_cpus(), model=model, physical=len(siblings) or None)


def usable_cpus() -> Cpus:
    """Return the number of cores that this process may use, and what limits it; less to read than ``read_cpus``."""
    logical, cpuset_cores = os.cpu_count() or 1, cpu_cgroup().cpuset_cores()
    return Cpus(logical=logical, usable=usable_cores(), quota_cores=cpu_quota(), cpuset_cores=cpuset_cores)


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


def threads_of_quota() -> str | None:
    """Return the threads for which the CPU quota suffices, of which libraries know nothing; None where none binds."""
    quota, threads = cpu_quota(), usable_cores()
    return str(threads) if quota is not None and threads == max(1, int(quota)) else None


def read_core_times(proc: Path = PROC) -> CoreTimes | None:
    """Return the total, busy and stolen time of all cores since boot; None if ``/proc/stat`` is unreadable."""
    # Its first line: cpu user nice system idle iowait irq softirq steal guest guest_nice; user includes guest.
    fields = read_text(proc / "stat").split("\n", 1)[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    ticks = [int(field) for field in fields[1:9]]
    total = sum(ticks)
    return CoreTimes(total=total, busy=total - ticks[3] - ticks[4], stolen=ticks[7])


def load_average() -> tuple[float, float, float] | None:
    """Return the load averages over 1, 5 and 15 minutes; None if they are unknown."""
    try:
        return os.getloadavg()
    except OSError:
        return None


class CoreWaits:
    """Clock of the time that the creating thread was runnable without a core, as the kernel counts it.

    On a busy machine this explains most of the difference between steps, and has nothing to do with the code. Reading
    it takes 1.3 µs in a loop, and more between the phases of a step, when the caches are cold.
    """

    def __init__(self) -> None:
        self._path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._fd = self._open()

    def __call__(self) -> float:
        """Return the seconds of waiting since the thread started."""
        try:
            waited_ns = parse_wait_ns(os.pread(self._fd, 96, 0))
        except (OSError, ValueError):
            # A script has closed the descriptor, and may have opened one of its files under the number.
            self._fd = self._open()
            waited_ns = parse_wait_ns(os.pread(self._fd, 96, 0))
        return (waited_ns or 0) * 1e-9

    def _open(self) -> int:
        # Stays open until the process ends, since it is read at every phase.
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)


def core_waits() -> CoreWaits | None:
    """Return the clock of the calling thread; None if the kernel has no ``schedstat``."""
    try:
        waits = CoreWaits()
        waits()
    except (OSError, ValueError):
        return None
    return waits
