"""Time that a thread has waited for a core."""

from __future__ import annotations

import os
import threading

from trainer.host.processes import parse_wait_ns


class CoreWaits:
    """Clock of the time that the creating thread was runnable without a core, as the kernel counts it.

    On a busy machine this explains most of the difference between steps, and has nothing to do with the code. Reading
    it takes 1.3 µs in a loop, and more between the phases of a step, when the caches are cold.
    """

    def __init__(self) -> None:
        self._path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._fd = self._open()

    def __call__(self) -> float:
        """Return the seconds of waiting since the thread started."""
        try:
            waited_ns = parse_wait_ns(os.pread(self._fd, 96, 0))
        except (OSError, ValueError):
            # A script has closed the descriptor, and may have opened one of its files under the number.
            self._fd = self._open()
            waited_ns = parse_wait_ns(os.pread(self._fd, 96, 0))
        return (waited_ns or 0) * 1e-9

    def _open(self) -> int:
        # Stays open until the process ends, since it is read at every phase.
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)


def core_waits() -> CoreWaits | None:
    """Return the clock of the calling thread; None if the kernel has no ``schedstat``."""
    try:
        waits = CoreWaits()
        waits()
    except (OSError, ValueError):
        return None
    return waits
