"""Turns Ctrl-C, SIGTERM, a lost terminal and the end of a lease into one stop request that wakes a wait.

The first signal asks the ranks to keep their work; a second one, SIGUSR2 or the end of the lease does not wait for it.
A terminal that is closed hangs up more than once, by its kernel and by its shell, and means only one thing by it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

LEASE = "GPUTRAIN_LEASE"
"""Environment variable: ``stdin`` means that the end of standard input ends the run."""

AT_ONCE = signal.SIGUSR2
"""Asks for the end without waiting for anything: what a supervisor sends when another node has failed."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, AT_ONCE)


class StopRequested(BaseException):
    """Somebody asked for the end while nothing could be waited for; no Exception, so that nothing swallows it."""


class StopSignals:
    """While entered, signals and the lease set ``requested`` and make ``wake`` readable.

    Between ``interrupt(True)`` and ``interrupt(False)`` they raise StopRequested instead, in calls that block.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.requested: str | None = None
        """What asked for the end: the name of a signal, or ``the end of the lease``."""
        self.at_once = False
        """Whether nothing is to be waited for."""
        self.wake, self._waker = socket.socketpair()
        self._interrupted = False
        """Whether there was a Ctrl-C; the next one is not to be waited for."""
        self._lease = environ.get(LEASE) == "stdin"
        self._raising = False
        self._over = False
        self._before: dict[int, Any] = {}
        self._fd_before = -1

    def __enter__(self) -> StopSignals:
        """Install the handlers; on the main thread."""
        for end in (self.wake, self._waker):
            end.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        # What is started from here has its own standard input.
        os.environ.pop(LEASE, None)
        # What was ignored stays ignored: `nohup` means that a lost terminal is no stop request.
        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        if self._lease:
            threading.Thread(target=self._hold_lease, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Put the handlers back."""
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self.wake.close()
        self._waker.close()

    def interrupt(self, raising: bool) -> None:
        """Choose whether a signal raises; one that came before raises now."""
        self._raising = raising
        if raising and self.requested:
            raise StopRequested

    def drain(self) -> None:
        """Take what made ``wake`` readable."""
        try:
            while self.wake.recv(4096):
                pass
        except BlockingIOError:
            return

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.at_once |= number == AT_ONCE or (self._interrupted and number == signal.SIGINT)
        self._interrupted |= number == signal.SIGINT
        if self.requested is None:
            self.requested = signal.Signals(number).name
        if self._raising:
            self._raising = False
            raise StopRequested

    def _hold_lease(self) -> None:
        while os.read(0, 4096):
            pass
        if self._over:
            return
        self.at_once = True
        self.requested = self.requested or "the end of the lease"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
