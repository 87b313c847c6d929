"""Catches Ctrl-C, SIGTERM and a lost terminal as stop requests that can be waited for.

They are caught before anything they must end starts; whatever this command is doing then, they wait for nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end; what is ignored already stays so, as ``nohup`` wants it."""


class Interrupts:
    """The signals that asked this command to end; readable as a file once there was one."""

    def __init__(self) -> None:
        self.asked = False
        """Whether there ever was one."""
        self._heard: list[int] = []
        self._unsent: list[int] = []
        self._supervisor: int | None = None
        """A descriptor of the process that is to hear of them."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @contextmanager
    def caught(self) -> Iterator[Interrupts]:
        """Note the signals instead of dying from them."""
        before = {}
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, self._note)
        waker = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._read)
            os.close(self._write)

    @contextmanager
    def passed_to(self, supervisor: int) -> Iterator[None]:
        """Send the signals on to a process, also those that came before and found none.

        Args:
            supervisor: a pidfd, which never means another process.
        """
        self._supervisor = supervisor
        self._pass_on()
        try:
            yield
        finally:
            self._supervisor = None

    def take(self) -> list[int]:
        """Return the signals that came since the last time, in their order."""
        heard, self._heard = self._heard, []
        return heard

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._read

    def drain(self) -> None:
        """Forget the wake-ups."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self._heard.append(number)
        self._unsent.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._supervisor is not None and self._unsent:
            with suppress(ProcessLookupError, IndexError):  # a handler that came in between has sent it
                signal.pidfd_send_signal(self._supervisor, self._unsent.pop(0))
                signal.pidfd_send_signal(self._supervisor, signal.SIGCONT)  # a stopped one hears only then
