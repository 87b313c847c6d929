"""Killing of every descendant of this process, and reaping of those that it has adopted."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

from trainer.host.processes import children, descendants

POLL_S = 0.005
"""Seconds between two checks whether killed processes are gone."""


def kill_descendants(
    *,
    keep: Collection[int] = (),
    unreaped: Collection[int] = (),
    timeout_s: float = 3.0,
    wait: Callable[[float], None] = time.sleep,
) -> set[int]:
    """Kill all descendants of this process and wait until they are gone; return the pids of survivors.

    Complete only in a process that adopts orphans: a daemon of a dead rank is then its child.

    Args:
        keep: pids to leave alone, with their descendants.
        unreaped: pids of children whose exit codes others read.
        timeout_s: time-out for killed processes to disappear.
        wait: function that waits for the given seconds; it may return early when a child has ended.
    """
    pid = os.getpid()
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while True:
        direct = set(children(pid)) - set(keep)
        for child in direct:  # at once: a child that forks and exits in a loop lives for a moment only
            _kill(child)
        alive = descendants(pid, keep=keep)
        for each in alive - direct:
            _kill(each)
        # A child whose parent has ended is adopted and listed: if nobody listed lives, and the list is the same
        # afterwards, there is no descendant.
        if not alive and set(children(pid)) - set(keep) == direct:
            return set()
        if time.monotonic() > deadline:
            return alive
        reap({*keep, *unreaped})
        if alive <= killed:
            wait(POLL_S)
        killed |= alive


def reap(besides: Collection[int] = ()) -> None:
    """Wait for all children that have ended, but those given, so that no zombie is left."""
    for child in children(os.getpid()):
        if child not in besides:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
