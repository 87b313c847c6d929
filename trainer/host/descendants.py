"""Finds and kills every process below this one, however it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Return the living processes below ``pid``; zombies are dead, whoever has yet to reap them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # The second field is the program's name in parentheses and may hold anything; state and parent follow it.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(folder.name))
    found: set[int] = set()
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def kill_descendants(*, keep: Collection[int] = (), timeout_s: float = 3.0) -> set[int]:
    """Kill everything below this process and wait until it is gone; return what a kill could not end.

    Complete only in a process that adopts orphans: a daemon of a dead rank is then its child.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = descendants(os.getpid()) - set(keep)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def reap() -> None:
    """Take the exit codes of all children that have ended, so that no zombie is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
