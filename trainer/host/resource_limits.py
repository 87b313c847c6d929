"""Resource limits of this machine, and a check that the requested ranks could fit.

Without the check, starting ten thousand ranks would fail half-way with an obscure error.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.errors import MachineNotReadyError, RequestError
from trainer.host.descendants import prctl_refusal
from trainer.host.memory import read_container_limit_bytes, read_memory, read_swap_bytes
from trainer.host.proc_files import CGROUP, PROC, read_number

RANK_BYTES = 20 << 20
"""Minimum private memory of a rank: a CPU rank forked from a process with torch was measured to write 24 MiB before
its model."""
SCRIPT_BYTES = 5 << 20
"""Minimum private memory of a script's process, which may run without torch."""
SHM = Path("/dev/shm")
MIN_SHM_BYTES = 1 << 20
"""Least free shared memory: a data loading process needs some semaphores of 4 KiB, and its batches."""


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Limits of the machine and of this process; None means no limit."""

    processes: int | None
    """Smallest limit on processes of this user, the machine and the container."""
    files: int | None
    """Files that one process may open."""
    memory_bytes: int | None
    """Memory and swap of the machine, used or not, or the limit of the container if that is smaller."""
    missing: str = ""
    """What every run needs of the kernel and this machine or container lacks, and the fix; empty if nothing."""

    def refusal(self, ranks: int, *, rank_bytes: int = RANK_BYTES) -> str:
        """Return the reason why ``ranks`` ranks cannot fit on this machine; empty if none is known."""
        limits: list[tuple[int, str]] = []
        if self.processes is not None:
            limits.append((self.processes, f"{self.processes} processes are allowed"))
        # Descriptors that the node agent holds open for each rank: the pipe to it and its pidfd or sentinel.
        files_per_rank = 2
        other_files = 16  # descriptors that the node agent holds open besides those
        if self.files is not None:
            limits.append(((self.files - other_files) // files_per_rank, f"a process may open {self.files} files"))
        if self.memory_bytes is not None:
            why = f"{self.memory_bytes / (1 << 30):.1f} GiB of memory, and a rank takes {rank_bytes >> 20} MiB or more"
            limits.append((self.memory_bytes // rank_bytes, why))
        max_ranks, why = min(limits, default=(ranks, ""))
        if ranks <= max_ranks:
            return ""
        requested = f"{ranks} rank{'s were' if ranks != 1 else ' was'} asked for on this node"
        return f"{requested}, which can hold at most {max(max_ranks, 0)}: {why}"


def require(ranks: int, *, rank_bytes: int) -> None:
    """Check the number of ranks against the limits of this machine; passing does not guarantee that they fit.

    Raises:
        MachineNotReadyError: the kernel refuses what every run needs.
        RequestError: a limit is too low; the line names it.
    """
    limits = read_limits()
    if limits.missing:
        raise MachineNotReadyError(limits.missing)
    if reason := limits.refusal(ranks, rank_bytes=rank_bytes):
        raise RequestError(reason)


def require_shared_memory() -> None:
    """Check that data loading processes have the least shared memory that they need.

    Raises:
        MachineNotReadyError: ``/dev/shm`` is full.
    """
    free = free_bytes(SHM)
    if free is not None and free < MIN_SHM_BYTES:
        raise MachineNotReadyError(
            f"/dev/shm has {free >> 10} KiB free, and data loading processes share batches there: remove files, "
            "start the container with --shm-size=2g, or set --num-workers 0"
        )


def free_bytes(path: Path) -> int | None:
    """Return the free space for ordinary users on the file system of a path; None if it is not reported."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    # Some network file systems report a size of zero, whatever is free.
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def read_limits(proc: Path = PROC, cgroup: Path = CGROUP) -> ResourceLimits:
    """Read the limits of this machine and process."""
    sizes = [size for size in (read_memory(proc).total_bytes, read_swap_bytes(proc)) if size is not None]
    return ResourceLimits(
        processes=_least(
            _soft(resource.RLIMIT_NPROC),
            read_number(proc / "sys/kernel/pid_max"),
            read_number(proc / "sys/kernel/threads-max"),
            read_number(cgroup / "pids.max"),
        ),
        files=open_files(),
        memory_bytes=_least(sum(sizes) if sizes else None, read_container_limit_bytes(cgroup)),
        missing=_missing(proc),
    )


def _missing(proc: Path) -> str:
    if sys.platform != "linux":
        return ""
    if not (proc / "self" / "stat").exists():
        return f"{proc} is not mounted, which shows the processes of a run: mount -t proc proc {proc}"
    if why := prctl_refusal():
        return (
            f"prctl() is refused ({why}), with which ranks end when the run does: "
            "allow it in the container's seccomp profile"
        )
    return ""


def open_files() -> int | None:
    """Return the number of files that this process may open; None without a limit."""
    return _soft(resource.RLIMIT_NOFILE)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft
