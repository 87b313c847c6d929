"""CPU limits of a process: its affinity mask, and its cgroup's quota, throttling and cpuset, of version 1 or 2.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from trainer.host.proc_files import PROC, read_text


@dataclass(frozen=True, kw_only=True)
class CpuQuota:
    """CPU quota of one cgroup."""

    cores: float
    """CPU time per time that the processes of the cgroup may use together: quota divided by period."""
    throttled_ns: int = 0
    """Time since the cgroup was made for which its quota kept it from running, summed over the machine's cores."""

    def held_back_share(self, before: CpuQuota, seconds: float) -> float:
        """Return the share of some seconds for which the quota held the cgroup's busy threads back, 0 to 1.

        Throttled time is summed over cores. Divided by it and the time that the quota allows to run, it is the share of
        one thread, however many are busy.
        """
        throttled = max(0, self.throttled_ns - before.throttled_ns) / 1e9 / seconds
        return min(1.0, throttled, throttled / (throttled + self.cores)) if throttled else 0.0


@dataclass(frozen=True)
class CpuCgroup:
    """The cgroup of a process, as far as it concerns cores."""

    folders: tuple[Path, ...] = ()
    """Folders of the cgroup and its visible ancestors with the ``cpu`` controller, its own first."""
    cpuset_folders: tuple[Path, ...] = ()
    """Likewise with the ``cpuset`` controller."""

    def quotas(self) -> dict[Path, CpuQuota]:
        """Return the quota of the cgroup and of each ancestor that has one, by folder; the least of them binds."""
        quotas = ((folder, _read_quota(folder)) for folder in self.folders)
        return {folder: quota for folder, quota in quotas if quota is not None}

    def cpuset_cores(self) -> int | None:
        """Return the number of cores in its cpuset; None if that cannot be read."""
        for folder in self.cpuset_folders:
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                if cores := parse_cores(read_text(folder / name)):
                    return len(cores)
        return None


def cpu_cgroup(pid: int | None = None, proc: Path = PROC) -> CpuCgroup:
    """Return the cgroup of a process, by default of this one; without folders if it is not visible from here."""
    return _cpu_cgroup(read_text(proc / ("self" if pid is None else str(pid)) / "cgroup"), proc)


@lru_cache(maxsize=64)  # the ranks of a node are asked for once a second, and mostly share one
def _cpu_cgroup(entries: str, proc: Path) -> CpuCgroup:
    found: dict[str, tuple[Path, ...]] = {"cpu": (), "cpuset": ()}
    for line in entries.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, folders in found.items():
            if not controllers or controller in controllers.split(","):
                key = controller if controllers else ""
                found[controller] = folders + tuple(_folders(path, _mounts(proc).get(key, ())))
    return CpuCgroup(found["cpu"], found["cpuset"])


def cpu_quota(proc: Path = PROC) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its ancestors, in cores; None without a limit."""
    return min((quota.cores for quota in cpu_cgroup(proc=proc).quotas().values()), default=None)


def affinity(pid: int, proc: Path = PROC) -> frozenset[int]:
    """Return the cores on which the main thread of a process may run; empty if they cannot be read."""
    lines = read_text(proc / str(pid) / "status").splitlines()
    masks = (line.partition(":")[2] for line in lines if line.startswith("Cpus_allowed_list:"))
    return parse_cores(next(masks, ""))


def parse_cores(text: str) -> frozenset[int]:
    """Parse the kernel's list of cores, such as ``0-3,8``."""
    ranges = (each.partition("-") for each in text.strip().split(",") if each)
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def _folders(path: str, mounts: tuple[tuple[Path, str], ...]) -> Iterator[Path]:
    """Yield the folders of a cgroup and of its ancestors, below the first mount that shows it."""
    for point, root in mounts:
        # A container may see its own cgroup as the mount's root, or be outside of it (``/../other``).
        within = path == root or path.startswith(f"{root.rstrip('/')}/")
        below = path.removeprefix(root.rstrip("/")).strip("/") if within else ""
        folder = point if ".." in below.split("/") else point / below
        if shown := [each for each in (folder, *folder.parents) if each.is_relative_to(point) and each.is_dir()]:
            yield from shown
            return


@cache
def _mounts(proc: Path) -> Mapping[str, tuple[tuple[Path, str], ...]]:
    """Return mount points and roots of the cgroup file systems, by controller of version 1, and ``""`` of version 2.

    Read once: a host of many containers has thousands of mounts.
    """
    mounts: dict[str, tuple[tuple[Path, str], ...]] = {}
    for line in read_text(proc / "self/mountinfo").splitlines():
        # 32 31 0:29 ROOT POINT rw,relatime shared:9 - cgroup SOURCE rw,cpu,cpuacct
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if kinds[0] in ("cgroup", "cgroup2"):
            root, point = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), each) for each in fields[3:5])
            for key in kinds[-1].split(",") if kinds[0] == "cgroup" else [""]:
                mounts[key] = (*mounts.get(key, ()), (Path(point), root))
    return mounts


def _read_quota(folder: Path) -> CpuQuota | None:
    """Return the quota of one cgroup; None if it has none. Both versions have it as microseconds per period."""
    numbers = read_text(folder / "cpu.max").split()
    quota, period = numbers or [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if not (quota.isdecimal() and period.isdecimal()):  # "max", -1: no limit
        return None
    statistics = dict(line.split() for line in read_text(folder / "cpu.stat").splitlines())
    in_us, in_ns = statistics.get("throttled_usec", "0"), statistics.get("throttled_time", "0")
    return CpuQuota(cores=int(quota) / int(period), throttled_ns=int(in_us) * 1000 + int(in_ns))
