"""Identifies a process beyond its pid, which somebody else gets sooner or later."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec

PROC = Path("/proc")
HELD_S = 5.0
"""A process that is still held so long after SIGCONT is not going to run."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a certain machine since a certain boot. What is not known (no ``/proc``) is empty or 0."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_ticks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Clock ticks from boot to the start of the process: field 22 of ``/proc/PID/stat``."""
    boot_id: str
    """``/proc/sys/kernel/random/boot_id``."""
    host: str


def identify(pid: int | None = None, *, proc: Path = PROC) -> ProcessIdentity:
    """Name a living process of this machine; by default this one."""
    chosen = os.getpid() if pid is None else pid
    started = _started(chosen, proc)
    return ProcessIdentity(pid=chosen, start_ticks=started or 0, boot_id=_boot_id(proc), host=socket.gethostname())


def is_alive(process: ProcessIdentity, *, proc: Path = PROC, host: str | None = None) -> bool | None:
    """Whether that very process still runs; None when this machine cannot tell.

    A zombie counts as ended: it does nothing any more, its parent just has not asked yet.
    """
    if process.host != (socket.gethostname() if host is None else host) or not process.boot_id:
        return None
    if process.boot_id != _boot_id(proc):
        return False
    return _started(process.pid, proc) == process.start_ticks


def is_held(pid: int, *, proc: Path = PROC) -> bool:
    """Whether a process is kept from running, by SIGSTOP or by a debugger, so that it hears no signal but SIGKILL."""
    return _stat(pid, proc)[:1] in ([b"T"], [b"t"])


def ancestors(pid: int | None = None, *, proc: Path = PROC) -> list[int]:
    """Return the parent of a process, its parent, and so on; by default of this one."""
    found: list[int] = []
    fields = _stat(os.getpid() if pid is None else pid, proc)
    while fields and (parent := int(fields[1])) > 0:
        found.append(parent)
        fields = _stat(parent, proc)
    return found


def _started(pid: int, proc: Path) -> int | None:
    """Start time of a running process in ticks, or None when there is none of that number."""
    fields = _stat(pid, proc)
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def _stat(pid: int, proc: Path) -> list[bytes]:
    """Fields 3 and on of ``/proc/PID/stat``; none when there is no such process."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return []
    # The name stands in parentheses and may hold spaces and parentheses itself, so count from its end.
    return stat[stat.rfind(b")") + 2 :].split()


def _boot_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
