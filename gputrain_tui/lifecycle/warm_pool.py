"""Keeps a warm supervisor, with torch loaded in its node agent, while a launch is likely, so that a run starts fast.

The supervisor ends with this process, after ``IDLE_S`` without a request, or at ``close``; once it has a run it stays.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from gputrain_tui.lifecycle.leftovers import SUPERVISOR
from trainer.contract.warm_pool import READY
from trainer.host.proc_environ import ROOM

IDLE_S = 600.0
"""Time that a warm supervisor waits for a launch."""
OFFER_MARGIN_S = 2.0
"""Time before the end of that wait from which it is not used: an exiting supervisor would not read the request."""
RESTART_INTERVAL_S = 30.0
"""Minimum time between two starts, for supervisors that fail at once."""
END_S = 2.0
"""Time for a warm supervisor to end before it is killed."""


class WarmPool:
    """Pool of at most one warm supervisor, which waits for the next launch."""

    def __init__(self, *, idle_s: float = IDLE_S, now: Callable[[], float] = time.monotonic) -> None:
        """Make an empty pool; ``open`` starts the supervisor.

        Args:
            idle_s: time that the supervisor waits for a launch.
            now: a monotonic clock, seconds.
        """
        self._idle_s = idle_s
        self._now = now
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -math.inf
        self._wanted = -math.inf

    @property
    def pid(self) -> int | None:
        """Pid of the warm supervisor; None without one."""
        return self._process.pid if self._alive() and self._process is not None else None

    def open(self) -> None:
        """Start the warm supervisor, or extend its wait, as a launch is likely."""
        now = self._now()
        if self._alive():
            assert self._process is not None
            assert self._process.stdin is not None
            self._wanted = now
            with suppress(BrokenPipeError):
                self._process.stdin.write(b"\n")
        elif now >= self._started + RESTART_INTERVAL_S:
            self._started = self._wanted = now
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.supervisor", "--warm", str(self._idle_s)],
                env={**os.environ, SUPERVISOR: ROOM},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until torch is loaded; return whether it is within ``timeout_s``."""
        process = self._process
        if process is None or process.stdout is None:
            return False
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        return bool(ready) and os.read(process.stdout.fileno(), len(READY)) == READY

    def launch(self, words: list[str]) -> subprocess.Popen[bytes] | None:
        """Send the warm supervisor its command line and return its process; None without a warm supervisor.

        Args:
            words: the supervisor's command line. With ``--lease``, its standard input stays open.
        """
        process = self._process
        if not self._alive() or process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(words) + b"\n")
        except BrokenPipeError:
            self.close()
            return None
        if "--lease" not in words:
            process.stdin.close()
        process.stdout.close()
        self._process, self._started = None, -math.inf
        return process

    def close(self) -> None:
        """End the warm supervisor, and wait until it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its warm agent ends with it
            process.wait()
        process.stdout.close()

    def _alive(self) -> bool:
        """Whether the supervisor runs and still waits for ``OFFER_MARGIN_S`` or longer."""
        if self._process is None:
            return False
        if self._now() >= self._wanted + self._idle_s - OFFER_MARGIN_S or self._process.poll() is not None:
            self.close()
            return False
        return True
