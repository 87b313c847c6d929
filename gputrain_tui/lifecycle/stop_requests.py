"""Stop requests by signal and lease, and the sleep from which they wake the supervisor."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Literal

HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that who starts a supervisor blocks: they wait until it has its handlers."""
LEASE = 0
"""The descriptor whose end ends a leased run."""

StopLevel = Literal[0, 1, 2, 3]
"""How the run is to end: not yet, in order, at once, without asking."""


class StopRequests:
    """What has been asked for so far; one for the process, on its main thread."""

    def __init__(self, *, leased: bool) -> None:
        """Listen to the lease, where there is one; to signals from ``catch`` on."""
        self.reason: str | None = None
        """Who asked for the end first; None while nobody has."""
        self.level: StopLevel = 0
        self._interrupted = False
        """Whether there was a Ctrl-C; the next one is not to be waited for."""
        self._leased = leased
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        if leased:
            self._poll.register(LEASE, select.POLLIN)

    def catch(self) -> None:
        """Take signals from here on."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)

    def watch(self, descriptor: int) -> None:
        """Wake also when this becomes readable."""
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, descriptor: int) -> None:
        """Wake for this no longer."""
        self._poll.unregister(descriptor)

    def wait(self, due: float) -> list[int]:
        """Sleep until a signal, the end of the lease or a watched descriptor; return the descriptors.

        Args:
            due: when to wake at the latest, monotonic seconds; infinite for never.
        """
        timeout = None if due == math.inf else max(0, math.ceil((due - time.monotonic()) * 1000))
        ready = []
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._wake_read:
                self._drain()
            elif descriptor == LEASE and self._leased:
                if not os.read(LEASE, 4096):
                    self._poll.unregister(LEASE)
                    self.ask("the command that started it is gone", 2)
            else:
                ready.append(descriptor)
        return ready

    def nap(self, seconds: float) -> None:
        """Sleep so long, or until a signal."""
        select.select([self._wake_read], [], [], seconds)
        self._drain()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Only a person at a terminal asks again because it takes too long: whoever else asks while the run is stopping
        # already, another `gputrain stop` or a scheduler, means the same end.
        again = self._interrupted and number == signal.SIGINT
        self._interrupted |= number == signal.SIGINT
        self.ask(f"stopped by {signal.Signals(number).name}", 3 if again else 1)

    def ask(self, reason: str, level: StopLevel) -> None:
        """Ask for the end of the run, unless something has been asked for that is more urgent."""
        self.level = max(level, self.level)
        self.reason = self.reason or reason
