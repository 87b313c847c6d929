"""Ctrl-C and SIGTERM as a wish that can be waited for, caught before anything is started that they must end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Interrupts:
    """How often somebody asked this command to end; readable as a file once they did."""

    def __init__(self) -> None:
        self.asked = 0
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @contextmanager
    def caught(self) -> Iterator[Interrupts]:
        """Note the signals instead of dying from them."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
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

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._read

    def drain(self) -> None:
        """Forget the wake-ups."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.asked += 1
