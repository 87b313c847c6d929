"""Watch of a run directory by its supervisor: the lock's time, the stop file, and whether the directory exists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.stop_file import read_stop_file
from trainer.contract.record import Failure, RunDir
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import StopRequest

CHECK_S = 1.0
"""Time between two checks of the run directory."""


class DirectoryWatch:
    """Watch of one run directory."""

    def __init__(self, run_dir: RunDir, stop_request: StopRequest, *, now: Callable[[], float]) -> None:
        self._dir = run_dir
        self._stop_request = stop_request
        self._now = now
        self.due = 0.0
        """Time of the next check, monotonic seconds."""
        self.deleted: Failure | None = None
        """Failure of a run whose directory was deleted."""

    def check(self) -> None:
        """Touch the lock, and stop the run at a request in the stop file or if its directory was deleted.

        No command finds a run without a directory.
        """
        self.due = time.monotonic() + CHECK_S
        with suppress(OSError):
            os.utime(self._dir.lock)
        level, reason = read_stop_file(self._dir)
        if level > self._stop_request.level:
            self._stop_request.ask(level, reason)
        if self.deleted is None and attempt_outcome.is_deleted(self._dir):
            self.deleted = attempt_outcome.deletion_failure(self._dir, self._now())
            print(self.deleted.message, file=sys.stderr, flush=True)
            self._stop_request.ask(StopLevel.SAVE, self.deleted.message)  # ``save_dir`` may be somewhere else
