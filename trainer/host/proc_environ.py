"""Run directory of a process in ``/proc/PID/environ``, also of a process that was started before its run was known.

``/proc`` shows the memory of the environment with which a process was started; ``os.environ`` does not change it. A
process that waits for a run is therefore started with a placeholder value, and overwrites it there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from trainer.host.processes import environ_value, read_environ, read_stat

RUN = "GPUTRAIN_RUN"
"""Environment variable of every process of a run that the console started: its run directory."""
SUPERVISOR = "GPUTRAIN_SUPERVISOR"
"""Environment variable of the supervisor of a run: its run directory."""
ROOM = " " * 4096
"""Placeholder value of a variable that is overwritten later; as long as the longest path."""


def run_of(pid: int, names: Sequence[str] = (SUPERVISOR, RUN)) -> str | None:
    """Return the run directory that the first of these variables in a process's environment names; None without one."""
    for name in names:
        value = environ_value(pid, name)
        if value is not None and value.startswith(b"/"):
            return os.fsdecode(value)
    return None


def is_same_directory(first: str, second: str) -> bool:
    """Whether two paths name the same directory, which may be deleted."""
    return first == second or os.path.realpath(first) == os.path.realpath(second)


def show_in_proc(name: str, value: str) -> None:
    """Write a variable's value into ``/proc/self/environ`` if this process was started with ``ROOM`` as its value."""
    prefix, new = f"{name}=".encode(), os.fsencode(value)
    stat, environ = read_stat(os.getpid()), read_environ(os.getpid())
    if stat is None:
        return
    address = stat.environ_address
    offset = environ.find(prefix + ROOM.encode() + b"\0")
    is_whole_name = offset == 0 or environ[offset - 1 : offset] == b"\0"
    if offset >= 0 and is_whole_name and address and len(new) <= len(ROOM):
        ctypes.memmove(address + offset + len(prefix), new.ljust(len(ROOM), b"\0"), len(ROOM))


def show_run_in_proc() -> None:
    """Write the run directory of this process, ``GPUTRAIN_RUN``, into ``/proc/self/environ``."""
    run = os.environ.get(RUN)
    if run:
        show_in_proc(RUN, run)
