"""Ends everything that this process has started, orphans included."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none can escape; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def sweep(patience_s: float, wait: Callable[[float], None]) -> list[int]:
    """Kill and reap every descendant; return the pids of those that would not go.

    Args:
        patience_s: how long killed processes may take to disappear.
        wait: returns when a child has ended, or after so many seconds.
    """
    import psutil  # only at the end: a run's start does not wait for it

    deadline = time.monotonic() + patience_s
    here = psutil.Process()
    while True:
        _reap()
        left = [process.pid for process in here.children(recursive=True)]
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait(0.02)  # a grandchild's end is not told to this process


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
