"""Keeps a warm supervisor waiting while a launch is near, so that the run starts at once.

It ends with this process, after ten minutes without a request, or when it is closed; one that has taken over a run
does not.
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
"""How long a warm supervisor waits for a launch."""
OFFER_MARGIN_S = 2.0
"""How long before that it is no longer offered: one that is leaving would not read the request."""
RESTART_INTERVAL_S = 30.0
"""Least time between two starts: one that ended by itself would do so again."""
END_S = 2.0
"""How long a warm supervisor may take to end."""


class WarmPool:
    """The warm supervisor that waits for the next launch, if there is one."""

    def __init__(self, *, idle_s: float = IDLE_S, now: Callable[[], float] = time.monotonic) -> None:
        """Start nothing before ``open``.

        Args:
            idle_s: how long it waits.
            now: a monotonic clock, seconds.
        """
        self._idle_s = idle_s
        self._now = now
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -math.inf
        self._wanted = -math.inf

    @property
    def pid(self) -> int | None:
        """Of the warm supervisor."""
        return self._process.pid if self._alive() and self._process is not None else None

    def open(self) -> None:
        """Start a warm supervisor for a launch that is near, or let it wait longer."""
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
                [sys.executable, "-m", "gputrain_tui.lifecycle.supervisor", "--warm", str(self._idle_s)],
                env={**os.environ, SUPERVISOR: ROOM},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until torch is loaded; return whether it was in time."""
        process = self._process
        if process is None or process.stdout is None:
            return False
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        return bool(ready) and os.read(process.stdout.fileno(), len(READY)) == READY

    def launch(self, words: list[str]) -> subprocess.Popen[bytes] | None:
        """Give the warm supervisor its run; return None when there is none.

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
            process.kill()  # what it has started ends with it
            process.wait()
        process.stdout.close()

    def _alive(self) -> bool:
        """Whether it waits, and will for a while."""
        if self._process is None:
            return False
        if self._now() >= self._wanted + self._idle_s - OFFER_MARGIN_S or self._process.poll() is not None:
            self.close()
            return False
        return True
