"""Kills every process below this one, however it was started."""

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
    """Kill everything below this process and wait until it is gone; return what a kill could not end.

    Complete only in a process that adopts orphans: a daemon of a dead rank is then its child.

    Args:
        keep: pids to leave alone.
        timeout_s: how long killed processes may take to disappear.
        wait: returns after so many seconds, or when a child has ended.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = descendants(os.getpid()) - set(keep)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return left
        wait(POLL_S)


def reap() -> None:
    """Take the exit codes of all children that have ended, so that no zombie is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
