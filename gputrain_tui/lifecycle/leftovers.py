"""Finds and kills the processes of a run by an environment variable with its run directory.

No file of the run directory decides which process is signalled: files may be damaged, copied or forged.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from gputrain_tui.lifecycle.polling import wait_until
from trainer.host.process_identity import is_alive, unmarked_processes
from trainer.host.processes import RUN, SUPERVISOR, ancestors, is_same_directory, pids, run_of


def processes_of(run_dir: Path) -> list[int]:
    """Return the living processes of a run, without supervisors, this process and its ancestors."""
    return sorted(pid for pid, path in _processes_with([RUN]) if is_same_directory(path, str(run_dir)))


def supervisors_of(run_dir: Path) -> list[int]:
    """Return the living supervisors of a run: its own, a successor that waits, and one that is about to be refused."""
    return sorted(pid for pid, path in _processes_with([SUPERVISOR]) if is_same_directory(path, str(run_dir)))


def living_runs(folder: Path) -> dict[str, Path]:
    """Return the run directories in a folder that have a living process, by run id, also deleted ones."""
    paths = {Path(path) for _, path in _processes_with([RUN, SUPERVISOR])}
    return {path.name: path for path in paths if is_same_directory(str(path.parent), str(folder))}


def _processes_with(variables: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the processes with one of the environment variables, and its path; not this process or its ancestors."""
    spared = {1, os.getpid(), *ancestors()}
    for pid in pids():
        for variable in variables if pid not in spared else ():
            if (path := run_of(pid, [variable])) is not None:
                yield pid, path


def open_process(pid: int, run_dir: Path, variable: str = RUN) -> int | None:
    """Return a pidfd of a process whose environment variable names a run; None if it does not."""

    def names_the_run() -> bool:
        path = run_of(pid, [variable])
        return path is not None and is_same_directory(path, str(run_dir))

    return _open_if(pid, names_the_run)


def _open_if(pid: int, is_it: Callable[[], bool | None]) -> int | None:
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    if is_it():  # checked after opening: the pidfd then refers to the checked process, or to one that has ended
        return descriptor
    os.close(descriptor)
    return None


def kill_processes(run_dir: Path, *, keep: Collection[int] = ()) -> list[int]:
    """Kill the processes of a run except ``keep``; return those that do not end within five seconds.

    Besides those with its environment variable, these are the ones without it that a killed node agent has listed.
    """
    left: list[int] = []

    def are_gone() -> bool:
        listed = {process.pid: process for process in unmarked_processes(run_dir)}
        left[:] = [pid for pid in (*processes_of(run_dir), *listed) if pid not in keep]
        for pid in left:
            process = listed.get(pid)
            descriptor = open_process(pid, run_dir) if process is None else _open_if(pid, partial(is_alive, process))
            if descriptor is not None:
                with suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
        return not left

    wait_until(are_gone, timeout_s=5.0)
    return left
