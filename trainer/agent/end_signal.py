"""Handler of the node agent's end signal: writes the rest of the record, even if the training thread is in C++."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from trainer.host.stop_request import NOW_SIGNAL

_writers: list[Callable[[], object]] = []
"""Functions that write the record."""
_ends: bool | None = None
"""Whether the signal ends the process; None if it is not blocked."""


def block(*, ends: bool) -> None:
    """Block NOW_SIGNAL; call it before any other thread is started, so that all threads inherit the mask.

    With ``ends`` it ends the process once the record is written; a script gets SIGTERM after it instead.
    """
    global _ends
    _ends = ends
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOW_SIGNAL])


def write_before_end(write: Callable[[], object]) -> None:
    """Register a function to call when the node agent ends this rank; it has about a second.

    A separate thread waits for the signal, since a training thread in a collective has released the GIL but runs no
    handlers. If a thread in C++ holds the GIL, SIGKILL ends the rank without the call.
    """
    if _ends is not None and not _writers:
        threading.Thread(target=_wait, args=(_ends,), name="end-signal", daemon=True).start()
    _writers.append(write)


def write_record() -> None:
    """Write the rest of the record, for a rank that gets the node agent's request in another way."""
    for write in _writers:
        write()


def _wait(ends: bool) -> None:
    while True:
        signal.sigwait([NOW_SIGNAL])
        write_record()
        if ends:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOW_SIGNAL])
            os.kill(os.getpid(), NOW_SIGNAL)
