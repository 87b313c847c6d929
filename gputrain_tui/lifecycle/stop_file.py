"""Passes a stop on through the run directory, where the supervisor is on another host that sees it too."""

from __future__ import annotations

import time

from gputrain_tui.history.status_file import ENDED, read_status
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import read_part
from trainer.contract.stop_level import StopLevel

POLL_S = 0.1
"""Time between two looks at what the supervisor does."""
BEAT_TIMEOUT_S = 5.0
"""How long a supervisor's lock may keep its time, which changes once a second, on a file system of a network."""


def read_stop_file(run_dir: RunDir) -> StopLevel:
    """Return the level that another host has asked for."""
    try:
        return StopLevel(int(read_part(run_dir.stop, 0, 8)))
    except (OSError, ValueError):
        return StopLevel.NONE


def write_stop_file(run_dir: RunDir) -> None:
    """Ask for a stop that saves; asked again, for one that does not wait for that.

    Raises:
        OSError: the run directory cannot be written.
    """
    level = StopLevel.NOW if read_stop_file(run_dir) else StopLevel.SAVE
    write_atomically(run_dir.stop, str(int(level)).encode())


def supervisor_beats(run_dir: RunDir) -> bool:
    """Whether a supervisor on some host lives, seen by its lock; waits for it."""
    try:
        before = run_dir.lock.stat().st_mtime_ns
        deadline = time.monotonic() + BEAT_TIMEOUT_S
        while time.monotonic() < deadline:
            if run_dir.lock.stat().st_mtime_ns != before:
                return True
            time.sleep(POLL_S)
    except OSError:
        return False
    return False


def await_end(run_dir: RunDir, timeout_s: float) -> bool:
    """Wait until the status has how the run ended; return whether it has."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = read_status(run_dir)
        if status is not None and status.status in ENDED:
            return True
        time.sleep(POLL_S)
    return False
