"""Successor of a detached run's supervisor: a process that becomes the next supervisor if that one is killed.

``python -m gputrain_tui.lifecycle.successor RUN_DIR``, started by the supervisor. Its standard input, a pipe, ends when
the supervisor has died without dismissing it. It imports little, since it waits as long as the run lasts.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trainer.host.processes import SUCCESSOR, SUPERVISOR
from trainer.host.stop_request import STOP_SIGNALS

SUCCESSOR_DELAY_S = 60.0
"""Age at which a supervisor that has taken over starts a successor of its own. One that is killed sooner is not
replaced: supervisors that cannot live, as where memory is full, must not follow each other without end."""


class Successor:
    """The successor of one supervisor, started when it is due."""

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
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.successor", str(self._dir)],
                env={**os.environ, SUCCESSOR: str(self._dir)},
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


def main() -> NoReturn:
    """Wait for the end of the supervisor, and go on in its place."""
    run_dir = sys.argv[1]
    os.read(sys.stdin.fileno(), 1)
    # As the starter of a supervisor does: a stop request stays pending until the supervisor has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    environ = {name: value for name, value in os.environ.items() if name != SUCCESSOR}
    command = [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.supervisor", run_dir, "--adopt", "--restart"]
    os.execve(sys.executable, command, {**environ, SUPERVISOR: run_dir})


if __name__ == "__main__":
    main()
