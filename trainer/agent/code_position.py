"""Reports of the line of the user's code at which a rank's main thread stays, also before any step and without torch.

The node agent puts it into its samples, from which a stall gets its line.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from trainer.host.user_code import innermost_line, user_line

PERIOD_S = 3.0
"""Time between two checks; a report says that two in a row found the same line, and comes again while it is so."""


class CodePosition:
    """The line of a rank by its last report, on the agent's side."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._line, self._time = "", 0.0

    def set(self, line: str) -> None:
        """Take a report."""
        self._line, self._time = line, self._now()

    @property
    def line(self) -> str:
        """The line; empty if the rank has moved on, or reports no more, as in code that holds the interpreter."""
        return self._line if self._now() - self._time < 2.5 * PERIOD_S else ""


def report_position(report: Callable[[str], None]) -> None:
    """Report from a thread where the main thread stays; an empty line once it has moved on."""
    user_line("", 0, "")  # finds the folders of libraries before a script may hide their modules
    main = threading.main_thread().ident
    assert main is not None
    threading.Thread(target=_watch, args=(report, main), name="position-watch", daemon=True).start()


def _watch(report: Callable[[str], None], main: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # the script's threads get them, as without this
    before = reported = ""
    while True:
        time.sleep(PERIOD_S)
        line = innermost_line(main)
        stays = line if line == before else ""
        if stays or reported:
            report(stays)
        before, reported = line, stays
