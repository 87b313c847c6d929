"""Successor of a detached run's supervisor: another one, which waits until that one is killed, and takes over."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from trainer.host.processes import SUPERVISOR
from trainer.host.stop_request import STOP_SIGNALS, signals_blocked

WAITING = "import os, sys; os.read(0, 1); from gputrain_tui.lifecycle.supervisor import main; sys.exit(main())"
"""Python program of a supervisor that imports nothing before its standard input ends."""
SUCCESSOR_DELAY_S = 60.0
"""Age at which a supervisor that has taken over starts a successor of its own. One that is killed sooner is not
replaced: supervisors that cannot live, as where memory is full, must not follow each other without end."""


class Successor:
    """The successor of one supervisor, started when it is due; its standard input, a pipe, ends with that supervisor.

    A stop request that it gets stays pending until it takes over, and then stops the run.
    """

    def __init__(self, run_dir: Path, *, delay_s: float) -> None:
        self._dir = run_dir
        self._due = time.monotonic() + delay_s
        self._process: subprocess.Popen[bytes] | None = None

    def begin_if_due(self) -> None:
        """Start the process at its time; a run whose successor cannot be started goes on without one."""
        if time.monotonic() < self._due:
            return
        self._due = math.inf
        try:
            with signals_blocked(STOP_SIGNALS):
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", WAITING, str(self._dir), "--adopt", "--restart"],
                    env={**os.environ, SUPERVISOR: str(self._dir)},
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            print(f"no successor: {error.strerror}", file=sys.stderr, flush=True)

    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    def dismiss(self) -> None:
        """End the process, as this supervisor is about to end."""
        self._due = math.inf
        if self._process is not None:
            self._process.kill()
            with suppress(OSError):
                self._process.communicate()
            self._process = None
