"""The trainer's own lines of output, printed on a thread so that no rank waits for a disk.

Torch-free. Output of a task or a script is written before ``print`` returns, so that a killed rank has shown it. The
trainer's own lines repeat the record, so they may be printed later.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading

from trainer.contract.errors import printable_lines

LEAVE_S = 1.0
"""Time-out of printing the remaining lines at the end of a rank."""


class LinePrinter:
    """Printer of lines, in order, that does not block the caller."""

    def __init__(self, terminal: int | None = None) -> None:
        """Print to standard output and, if that is a log, to the descriptor ``terminal`` too."""
        self._terminal = terminal
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def print_line(self, line: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="line printer", daemon=True)
            self._thread.start()
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all lines are printed, at most ``LEAVE_S``."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(LEAVE_S)
            self._thread = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            print(printable_lines(line), file=sys.stdout, flush=True)
            if self._terminal is not None:
                with contextlib.suppress(OSError):  # it is closed
                    os.write(self._terminal, (printable_lines(line) + "\n").encode(errors="backslashreplace"))
