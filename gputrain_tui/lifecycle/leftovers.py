"""Finds and kills the processes of a run by an environment variable with its run directory.

No file of the run directory decides which process is signalled: files may be damaged, copied or forged.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.host.process_identity import ProcessIdentity, is_alive, unmarked_processes
from trainer.host.processes import RUN, SUPERVISOR as SUPERVISOR, ancestors, is_same_directory, pids, run_of

MARK = RUN
"""Environment variable of all processes of a run except supervisors: the run directory."""


def processes_of(run_dir: Path) -> list[int]:
    """Return the living processes of a run, without supervisors, this process and its ancestors."""
    return _pids_naming(run_dir, MARK)


def supervisors_of(run_dir: Path) -> list[int]:
    """Return the living supervisors of a run: one, or two until a second one is refused."""
    return _pids_naming(run_dir, SUPERVISOR)


def living_runs(folder: Path) -> dict[str, Path]:
    """Return the run directories in a folder that have a living process, by run id, also deleted ones."""
    found = {}
    for _, named in _marked_processes([MARK, SUPERVISOR]):
        path = Path(named)
        if is_same_directory(str(path.parent), str(folder)):
            found[path.name] = path
    return found


def open_process(pid: int, run_dir: Path, mark: str = MARK) -> int | None:
    """Return a pidfd of a process whose environment variable names a run; None if it does not."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    # Read after opening: the pidfd then refers to the process whose environment is read, or to one that has ended.
    named = run_of(pid, [mark])
    if named is not None and is_same_directory(named, str(run_dir)):
        return descriptor
    os.close(descriptor)
    return None


def kill_processes(run_dir: Path, patience_s: float = 5.0, *, keep: Collection[int] = ()) -> list[int]:
    """Kill the processes of a run except ``keep``; return those that do not end within ``patience_s``.

    Besides the marked ones, these are the unmarked ones that a killed node agent has listed.
    """
    deadline = time.monotonic() + patience_s
    while True:
        unmarked = {process.pid: process for process in unmarked_processes(run_dir)}
        left = [pid for pid in (*processes_of(run_dir), *unmarked) if pid not in keep]
        if not left or time.monotonic() > deadline:
            break
        for pid in left:
            descriptor = _open_listed(unmarked[pid]) if pid in unmarked else open_process(pid, run_dir)
            if descriptor is not None:
                with suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
        time.sleep(0.02)
    return left


def _open_listed(process: ProcessIdentity) -> int | None:
    """Return a pidfd of a process; None if it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    if is_alive(process):  # checked after opening, so that the pidfd refers to the checked process
        return descriptor
    os.close(descriptor)
    return None


def _pids_naming(run_dir: Path, mark: str) -> list[int]:
    return sorted(pid for pid, named in _marked_processes([mark]) if is_same_directory(named, str(run_dir)))


def _marked_processes(marks: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the processes with one of the environment variables, and its path; not this process or its ancestors."""
    spared = {1, os.getpid(), *ancestors()}
    for pid in pids():
        if pid not in spared:
            for mark in marks:
                if (named := run_of(pid, [mark])) is not None:
                    yield pid, named
