"""Identity of a process beyond its pid, which the kernel reuses; and processes of a run that do not carry its variable.

A daemon that ``env -i`` started has no environment variable of its run. Its node agent lists it in its temporary
folder, by which it is found if the agent is killed. The folder belongs to this user and to one run directory: no copied
or forged file of a run names a process to be killed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record.regular_file import read_json
from trainer.contract.record.run_dir import write_atomically
from trainer.host.boot import boot_id
from trainer.host.proc_files import PROC
from trainer.host.processes import RUN, SUPERVISOR, descendants, environ_value, read_stat
from trainer.host.temporary_folder import temporary_folders

HELD_S = 5.0
"""Seconds after SIGCONT after which a process that is still stopped counts as stuck."""

UNMARKED_FILE = "unmarked.json"


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Pid of a process with its start time, boot and host; unknown fields (no ``/proc``) are empty or 0."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_ticks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Clock ticks from boot to the start of the process: field 22 of ``/proc/PID/stat``."""
    boot_id: str
    """``/proc/sys/kernel/random/boot_id``."""
    host: str


_decode = msgspec.json.Decoder(list[ProcessIdentity])


def identify(pid: int | None = None, *, proc: Path = PROC) -> ProcessIdentity:
    """Return the identity of a living process of this machine, by default of this one."""
    pid = os.getpid() if pid is None else pid
    started = _started(pid, proc)
    return ProcessIdentity(pid=pid, start_ticks=started or 0, boot_id=boot_id(proc), host=socket.gethostname())


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether this process still runs; None if it belongs to another machine or its identity is incomplete.

    A zombie counts as ended: only its exit code is left, for which its parent has not waited yet.
    """
    if process.host != socket.gethostname() or not process.boot_id:
        return None
    return process.boot_id == boot_id() and _started(process.pid) == process.start_ticks


def _started(pid: int, proc: Path = PROC) -> int | None:
    """Return the start time of a running process in clock ticks; None if there is none with that pid."""
    stat = read_stat(pid, proc)
    return stat.start_ticks if stat is not None and stat.alive else None


class UnmarkedProcesses:
    """List of the unmarked descendants of this process, a node agent, in the node's temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / UNMARKED_FILE
        self._listed: set[int] = set()

    def update(self) -> None:
        unmarked = {
            pid for pid in descendants(os.getpid()) if all(environ_value(pid, n) is None for n in (RUN, SUPERVISOR))
        }
        if unmarked != self._listed:
            try:
                write_atomically(self._path, msgspec.json.encode([identify(pid) for pid in sorted(unmarked)]))
            except OSError:
                return  # a full disk, or a script that has emptied its TMPDIR
            self._listed = unmarked


def unmarked_processes(run_dir: Path) -> Iterator[ProcessIdentity]:
    """Yield the listed processes of a run that still live."""
    max_nodes = 256  # nodes of a run whose lists are looked for on this machine, where few run
    for folder in temporary_folders(run_dir, range(max_nodes)):
        try:
            listed = read_json(folder / UNMARKED_FILE, _decode)
        except RecordError:
            continue
        yield from (process for process in listed if is_alive(process))
