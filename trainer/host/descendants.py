"""Killing of every descendant of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

from trainer.host.processes import descendants

POLL_S = 0.005
"""Seconds between two checks whether killed processes are gone."""


def kill_descendants(
    *, keep: Collection[int] = (), timeout_s: float = 3.0, wait: Callable[[float], None] = time.sleep
) -> set[int]:
    """Kill all descendants of this process and wait until they are gone; return the pids of survivors.

    Complete only in a process that adopts orphans: a daemon of a dead rank is then its child.

    Args:
        keep: pids to leave alone.
        timeout_s: time-out for killed processes to disappear.
        wait: function that waits for the given seconds; it may return early when a child has ended.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        alive = descendants(os.getpid()) - set(keep)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not alive or time.monotonic() > deadline:
            return alive
        wait(POLL_S)


def reap() -> None:
    """Wait for all children that have ended, so that no zombie is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
