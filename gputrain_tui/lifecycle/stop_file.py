"""Stops a run through a file in its directory, if the supervisor is on another host with the same file system."""

from __future__ import annotations

import time

from gputrain_tui.history.status_file import ENDED, read_status
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import read_part
from trainer.contract.stop_level import StopLevel

POLL_S = 0.1
"""Time between two checks for the supervisor's answer."""
MAX_STOP_BYTES = 80
"""Bytes of the stop file that are read."""
BEAT_TIMEOUT_S = 5.0
"""Time for the mtime of the lock to change; a supervisor updates it once a second, a network file system delays it."""


def read_stop_file(run_dir: RunDir) -> tuple[StopLevel, str]:
    """Return the stop level requested by another host, and the reason of the stop."""
    try:
        level, _, reason = read_part(run_dir.stop, 0, MAX_STOP_BYTES).decode().partition(" ")
        return StopLevel(int(level)), f"{reason} on another host"
    except (OSError, ValueError):
        return StopLevel.NONE, ""


def write_stop_file(run_dir: RunDir, reason: str) -> None:
    """Request a stop with a checkpoint; if there is a request already, a stop without one.

    Raises:
        OSError: the run directory cannot be written.
    """
    level = StopLevel.NOW if read_stop_file(run_dir)[0] else StopLevel.SAVE
    write_atomically(run_dir.stop, f"{int(level)} {reason}".encode())


def supervisor_beats(run_dir: RunDir) -> bool:
    """Whether a supervisor on any host is alive: wait until it updates the mtime of the lock."""
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
    """Wait until the status is final; return whether it is within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = read_status(run_dir)
        if status is not None and status.status in ENDED:
            return True
        time.sleep(POLL_S)
    return False
