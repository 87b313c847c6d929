"""Descendants of this process: adopting, killing and reaping them, and dying with one's parent.

Standard library only, since this file travels to remote hosts with the host agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection

from trainer.host.processes import children, descendants, is_same_directory, run_of

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
"""Options of ``prctl(2)``."""


def die_with_parent_process() -> None:
    """Have the kernel kill this process when the thread that started it ends; inherited by exec, not by fork."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (child subreaper), so that none escapes; Linux only."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl_refusal() -> str:
    """Return why this process may not call prctl; empty if it may."""
    try:
        _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(ctypes.c_int()))
    except OSError as error:
        return error.strerror or ""
    return ""


def _prctl(option: int, value: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "prctl")


def kill_descendants(
    *,
    run: str | None,
    keep: Collection[int] = (),
    unreaped: Collection[int] = (),
    timeout_s: float = 5.0,
    wait: Callable[[float], None] = time.sleep,
) -> set[int]:
    """Kill all descendants of this process and wait until they are gone; return the pids of survivors.

    Complete only in a process that adopts orphans: a daemon of a dead rank is then its child. Processes of another run
    are left alone, such as those of one that a script has started detached.

    Args:
        run: run directory of this process; None if it has none.
        keep: pids to leave alone, with their descendants.
        unreaped: pids of children whose exit codes others read.
        timeout_s: time-out for killed processes to disappear.
        wait: function that waits for the given seconds; it may return early when a child has ended.
    """
    pid = os.getpid()
    keep = {*keep, *_of_other_runs(run)}
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while True:
        direct = set(children(pid)) - keep
        for child in direct:  # at once: a child that forks and exits in a loop lives for a moment only
            _kill(child)
        alive = descendants(pid, keep=keep)
        for each in alive - direct:
            _kill(each)
        # A child whose parent has ended is adopted and listed: if nobody listed lives, and the list is the same
        # afterwards, there is no descendant.
        if not alive and set(children(pid)) - keep == direct:
            return set()
        if time.monotonic() > deadline:
            return alive
        reap({*keep, *unreaped})
        if alive <= killed:
            wait(0.005)  # they take a moment to disappear
        killed |= alive


def reap(besides: Collection[int] = ()) -> None:
    """Wait for all children that have ended, but those given, so that no zombie is left."""
    for child in children(os.getpid()):
        if child not in besides:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _of_other_runs(run: str | None) -> set[int]:
    """Return the descendants of this process that belong to another run by their environment."""
    runs = {pid: run_of(pid) for pid in descendants(os.getpid())}
    return {pid for pid, path in runs.items() if path is not None and (run is None or not is_same_directory(path, run))}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
