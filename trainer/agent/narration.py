"""Prints the trainer's own lines in a thread, so that no rank waits for a disk.

Torch-free. What a task or a script prints is written before ``print`` returns, so that a rank that is killed has
shown it; the trainer's narration, which the record holds as well, is handed to a thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading

from trainer.contract.errors import printable_lines

LEAVE_S = 1.0
"""How long a rank that ends waits for a disk to take its narration."""


class Narration:
    """Prints lines in their order without making the caller wait."""

    def __init__(self, terminal: int | None = None) -> None:
        """Start with nothing to print.

        Args:
            terminal: descriptor that gets each line too, when standard output is a log.
        """
        self._terminal = terminal
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Print a line without waiting for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="narration", daemon=True)
            self._thread.start()
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all is printed, for a short time at most."""
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
