"""Identity of a process beyond its pid, which the kernel reuses."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.host.boot import boot_id
from trainer.host.proc_files import PROC
from trainer.host.processes import read_stat

HELD_S = 5.0
"""Seconds after SIGCONT after which a process that is still stopped counts as stuck."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Pid of a process with its start time, boot and host; unknown fields (no ``/proc``) are empty or 0."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_ticks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Clock ticks from boot to the start of the process: field 22 of ``/proc/PID/stat``."""
    boot_id: str
    """``/proc/sys/kernel/random/boot_id``."""
    host: str


def identify(pid: int | None = None, *, proc: Path = PROC) -> ProcessIdentity:
    """Return the identity of a living process of this machine, by default of this one."""
    chosen = os.getpid() if pid is None else pid
    started = _started(chosen, proc)
    return ProcessIdentity(pid=chosen, start_ticks=started or 0, boot_id=boot_id(proc), host=socket.gethostname())


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether this process still runs; None if it belongs to another machine or its identity is incomplete.

    A zombie counts as ended: only its exit code is left, for which its parent has not waited yet.
    """
    if process.host != socket.gethostname() or not process.boot_id:
        return None
    if process.boot_id != boot_id():
        return False
    return _started(process.pid) == process.start_ticks


def _started(pid: int, proc: Path = PROC) -> int | None:
    """Return the start time of a running process in clock ticks; None if there is none with that pid."""
    stat = read_stat(pid, proc)
    return stat.start_ticks if stat is not None and stat.alive else None
