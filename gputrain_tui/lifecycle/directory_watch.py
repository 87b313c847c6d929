"""Watch of a run by its supervisor, once a second: the lock's time, the stop file, the run directory, silent hosts.

A stop file stops a run whose supervisor is on another host with the same file system.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.lifecycle.polling import wait_until
from gputrain_tui.output import log_line
from gputrain_tui.plan.planner import Plan
from trainer.contract.record import Failure, Finding, RunDir, read_stack_request, write_atomically
from trainer.contract.record.regular_file import read_part
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import StopRequest

CHECK_S = 1.0
SILENT_S = 5.0
"""Silence of a host, which answers once a second, from which it is reported; the run is not diagnosed meanwhile, as
the record of its ranks ends where the connection broke."""
MAX_STOP_BYTES = 80
BEAT_TIMEOUT_S = 5.0
"""Time for the mtime of the lock to change; a supervisor updates it once a second, a network file system delays it."""


def read_stop_file(run_dir: RunDir) -> tuple[StopLevel, str]:
    """Return the stop level requested in the stop file, and the reason of the stop."""
    try:
        level, _, reason = read_part(run_dir.stop, 0, MAX_STOP_BYTES).decode().partition(" ")
        return StopLevel(int(level)), reason
    except (OSError, ValueError):
        return StopLevel.NONE, ""


def write_stop_file(run_dir: RunDir, reason: str) -> None:
    """Request a stop with a checkpoint; if there is a request already, a stop without one."""
    level = StopLevel.NOW if read_stop_file(run_dir)[0] else StopLevel.SAVE
    write_atomically(run_dir.stop, f"{int(level)} {reason}".encode())


def supervisor_beats(run_dir: RunDir) -> bool:
    """Whether a supervisor on any host is alive: wait until it updates the mtime of the lock."""
    try:
        before = run_dir.lock.stat().st_mtime_ns
        return wait_until(lambda: run_dir.lock.stat().st_mtime_ns != before, BEAT_TIMEOUT_S)
    except OSError:
        return False


class SupervisorBeats:
    """Beats of a run's supervisor, which updates the mtime of the lock once a second, as another process sees them."""

    def __init__(self, run_dir: RunDir, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._dir = run_dir
        self._clock = clock
        self._mtime_ns = 0
        self._at = clock()

    def silent_s(self) -> float:
        """Return how long there has been no beat, seconds, as far as this process has asked; by its own clock."""
        with suppress(OSError):
            if (mtime_ns := self._dir.lock.stat().st_mtime_ns) != self._mtime_ns:
                self._mtime_ns, self._at = mtime_ns, self._clock()
        return self._clock() - self._at


class DirectoryWatch:
    """Watch of one run directory."""

    def __init__(self, run_dir: RunDir, stop_request: StopRequest) -> None:
        self._dir = run_dir
        self._stop_request = stop_request
        self.due = 0.0
        """Time of the next check, monotonic seconds."""
        self.stack_request = read_stack_request(run_dir)
        """The newest request for the stacks of all ranks; empty without one."""
        self.deleted: Failure | None = None

    def check(self) -> None:
        """Touch the lock, and stop the run at a request in the stop file or if its directory was deleted.

        No command finds a run without a directory.
        """
        self.due = time.monotonic() + CHECK_S
        with suppress(OSError):
            os.utime(self._dir.lock)
        self.stack_request = read_stack_request(self._dir)
        level, reason = read_stop_file(self._dir)
        if level > self._stop_request.level:
            self._stop_request.ask(level, f"{reason} on another host")
        if self.deleted is None and attempt_outcome.is_deleted(self._dir):
            self.deleted = attempt_outcome.deletion_failure(self._dir, time.time())
            log_line(self.deleted.message)
            self._stop_request.ask(StopLevel.SAVE, self.deleted.message)  # ``save_dir`` may be somewhere else


def silence_findings(silent: set[int], running: Iterable[NodeProcess], plan: Plan) -> list[Finding]:
    """Update the silent nodes; return a finding for each host that has become silent or answers again."""
    changed = [process for process in running if (process.silent_s() >= SILENT_S) != (process.node in silent)]
    silent ^= {process.node for process in changed}
    return [
        Finding(
            time=time.time(),
            kind="host_silent",
            state="raised" if process.node in silent else "cleared",
            rank=plan.nodes[process.node].first_rank,
            host=process.host,
            message=f"no contact with {process.host}: its ranks may still be running; "
            "their record follows when it answers again",
            advice="the disk of its run directory stands still"
            if process.node in silent and process.lost_s() < SILENT_S
            else f"check that `ssh {process.host} true` works; if so, the disk of its run directory may stand still",
        )
        for process in changed
    ]
