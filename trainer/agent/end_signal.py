"""Write the rest of a rank's record when its node agent ends it, also while its training thread sits in C++."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from trainer.host.stop_request import NOW_SIGNAL

_writers: list[Callable[[], object]] = []
"""What writes the record."""
_ends: bool | None = None
"""Whether the signal ends the process; None where it is not held."""


def hold(*, ends: bool) -> None:
    """Block NOW_SIGNAL; call it before any other thread is started, all of which inherit that.

    Args:
        ends: whether the signal ends the process once the record is written; a script is ended by a SIGTERM after it.
    """
    global _ends
    _ends = ends
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOW_SIGNAL])


def write_before_end(write: Callable[[], object]) -> None:
    """Call a function when the node agent ends this rank; it has about a second.

    A thread of its own takes the signal: one that sits in a collective has let go of the interpreter. Where one holds
    it, SIGKILL comes later.
    """
    if _ends is not None and not _writers:
        threading.Thread(target=_wait, args=(_ends,), name="end-signal", daemon=True).start()
    _writers.append(write)


def _wait(ends: bool) -> None:
    while True:
        signal.sigwait([NOW_SIGNAL])
        for write in _writers:
            write()
        if ends:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOW_SIGNAL])
            os.kill(os.getpid(), NOW_SIGNAL)
