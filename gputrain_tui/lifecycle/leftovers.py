"""Finds and kills the processes that are left of a run, by the mark in their environment.

Nothing in a run directory decides about that: files may be damaged, copied or forged, and a process is
signalled only when its own environment names this very run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.host.proc_environ import RUN
from trainer.host.processes import ancestors, environ_value, pids

MARK = RUN
"""Environment variable of every process of a run, supervisors excepted: its run directory."""
SUPERVISOR = "GPUTRAIN_SUPERVISOR"
"""Environment variable of a supervisor alone: the directory of its run."""


def processes_of(run_dir: Path) -> list[int]:
    """Return the living processes of a run, supervisors excepted; never this one or one that led to it."""
    return _pids_naming(run_dir, MARK)


def supervisors_of(run_dir: Path) -> list[int]:
    """Return the living supervisors of a run: one, or two for the moment in which one is refused."""
    return _pids_naming(run_dir, SUPERVISOR)


def living_runs(folder: Path) -> dict[str, Path]:
    """Return the runs of a folder that have a living process, by their ids, also where the directory is gone."""
    found = {}
    for _, named in _marked_processes([MARK, SUPERVISOR]):
        path = Path(named)
        if _same_directory(path.parent, folder):
            found[path.name] = path
    return found


def open_process(pid: int, run_dir: Path, mark: str = MARK) -> int | None:
    """Open a pidfd of a process whose environment names a run; None when it does not."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    # Asked after it was opened: the descriptor means the process that was asked, or one that has ended.
    named = _marked_path(pid, mark)
    if named is not None and _same_directory(Path(named), run_dir):
        return descriptor
    os.close(descriptor)
    return None


def kill_processes(run_dir: Path, patience_s: float = 5.0, *, keep: Collection[int] = ()) -> list[int]:
    """Kill every process of a run but some; return those that do not end."""
    deadline = time.monotonic() + patience_s
    while left := [pid for pid in processes_of(run_dir) if pid not in keep]:
        if time.monotonic() > deadline:
            break
        for pid in left:
            descriptor = open_process(pid, run_dir)
            if descriptor is not None:
                with suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
        time.sleep(0.02)
    return left


def _pids_naming(run_dir: Path, mark: str) -> list[int]:
    return sorted(pid for pid, named in _marked_processes([mark]) if _same_directory(Path(named), run_dir))


def _marked_processes(marks: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the processes that have a mark, and what it names."""
    spared = {1, os.getpid(), *ancestors()}
    for pid in pids():
        if pid not in spared:
            for mark in marks:
                if (named := _marked_path(pid, mark)) is not None:
                    yield pid, named


def _marked_path(pid: int, mark: str) -> str | None:
    """Return the absolute path that a process's environment gives for a mark; None where there is none."""
    value = environ_value(pid, mark)
    return os.fsdecode(value) if value is not None and value.startswith(b"/") else None


def _same_directory(first: Path, second: Path) -> bool:
    """Whether two paths name one directory, which may be gone."""
    return first == second or os.path.realpath(first) == os.path.realpath(second)
