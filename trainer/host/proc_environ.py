"""Writes a process's run into ``/proc/PID/environ``, also where it was started before its run was known.

``/proc`` shows the environment that a process was started with, whatever it sets later. A process that waits for a
run is therefore started with room for the name, and writes it there.
"""

from __future__ import annotations

import ctypes
import os

from trainer.host.processes import read_environ, read_stat

RUN = "GPUTRAIN_RUN"
"""Environment variable of every process of a run that the console started: its run directory."""
ROOM = " " * 4096
"""Placeholder value of a variable that is written later; as long as the longest path."""


def show_in_proc(name: str, value: str) -> None:
    """Write a variable's value where it was started with ``ROOM``; nothing is done where it was not."""
    prefix, new = f"{name}=".encode(), os.fsencode(value)
    stat, environ = read_stat(os.getpid()), read_environ(os.getpid())
    if stat is None:
        return
    address = stat.environ_address
    offset = environ.find(prefix + ROOM.encode() + b"\0")
    begins = offset == 0 or environ[offset - 1 : offset] == b"\0"
    if offset >= 0 and begins and address and len(new) <= len(ROOM):
        ctypes.memmove(address + offset + len(prefix), new.ljust(len(ROOM), b"\0"), len(ROOM))


def show_run_in_proc() -> None:
    """Write the run that this process has come to belong to."""
    run = os.environ.get(RUN)
    if run:
        show_in_proc(RUN, run)
