"""Ctrl-C, SIGTERM and a lost terminal as wishes that can be waited for, caught before anything they must end starts."""

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
        self._heard: list[int] = []
        self.asked = False
        """Whether there has been one."""
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
        self._heard.append(number)
        self.asked = True
