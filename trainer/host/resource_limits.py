"""Resource limits of this machine: refuses a number of ranks that it could never hold.

Starting them one by one would end in the middle, with ten thousand processes and an obscure error.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.errors import RequestError
from trainer.host.memory import read_container_limit_bytes, read_memory, read_swap_bytes
from trainer.host.proc_files import CGROUP, PROC, read_number

RANK_BYTES = 20 << 20
"""Least private memory of a rank: one on the CPU that shares torch's code with the others was measured to write
24 MiB before its model."""
SCRIPT_BYTES = 5 << 20
"""The same of a script, which may be without torch: a Python process alone."""
FILES_PER_RANK = 2
"""Descriptors that the node agent holds open for each rank: the pipe to it and its pidfd or sentinel."""
OTHER_FILES = 16
"""Descriptors that it holds open besides."""


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Limits of the machine and of this process; None is without a limit."""

    processes: int | None
    """Of this user, of the machine and of the container, the least."""
    files: int | None
    """That one process may open."""
    memory_bytes: int | None
    """Memory and swap, used or not, of the machine or of the container."""

    def refusal(self, ranks: int, *, rank_bytes: int = RANK_BYTES) -> str:
        """Return why so many ranks cannot be on this machine; empty where nothing rules it out."""
        held: list[tuple[int, str]] = []
        if self.processes is not None:
            held.append((self.processes, f"{self.processes} processes are allowed"))
        if self.files is not None:
            held.append(((self.files - OTHER_FILES) // FILES_PER_RANK, f"a process may open {self.files} files"))
        if self.memory_bytes is not None:
            why = f"{self.memory_bytes / (1 << 30):.1f} GiB of memory, and a rank takes {rank_bytes >> 20} MiB or more"
            held.append((self.memory_bytes // rank_bytes, why))
        most, why = min(held, default=(ranks, ""))
        if ranks <= most:
            return ""
        asked = f"{ranks} rank{'s were' if ranks != 1 else ' was'} asked for on this node"
        return f"{asked}, which can hold at most {max(most, 0)}: {why}"


def require(ranks: int, *, rank_bytes: int = RANK_BYTES) -> None:
    """Refuse more ranks than this machine can hold in any case; that fewer fit is not promised.

    Raises:
        RequestError: it cannot; the line says what is short.
    """
    reason = read_limits().refusal(ranks, rank_bytes=rank_bytes)
    if reason:
        raise RequestError(reason)


def read_limits(proc: Path = PROC, cgroup: Path = CGROUP) -> ResourceLimits:
    """Read the limits of this machine and process."""
    sizes = [size for size in (read_memory(proc).total_bytes, read_swap_bytes(proc)) if size is not None]
    machine = sum(sizes) if sizes else None
    return ResourceLimits(
        processes=_least(
            _soft(resource.RLIMIT_NPROC),
            read_number(proc / "sys/kernel/pid_max"),
            read_number(proc / "sys/kernel/threads-max"),
            read_number(cgroup / "pids.max"),
        ),
        files=open_files(),
        memory_bytes=_least(machine, read_container_limit_bytes(cgroup)),
    )


def open_files() -> int | None:
    """Return how many files this process may open; None without a limit."""
    return _soft(resource.RLIMIT_NOFILE)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _soft(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft
