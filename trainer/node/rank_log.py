"""What a rank prints: a full disk costs words, not the training, and the trainer's own words never wait for a disk.

Torch-free. What a task or a script prints is written before ``print`` returns, so that a rank that is killed has
shown it; the trainer's narration, which the record holds as well, is handed to a thread.
"""

from __future__ import annotations

import io
import queue
import sys
import threading

from trainer.errors import printable_lines

LEAVE_S = 1.0
"""How long a rank that ends waits for a disk to take its narration."""


class LogFile(io.FileIO):
    """A file that takes everything: what the disk refuses is counted, and the count written once it takes more."""

    def __init__(self, fd: int) -> None:
        """Write to an open file, which stays open."""
        super().__init__(fd, "wb", closefd=False)
        self._lost_bytes = 0
        self._why = ""

    def write(self, data: object, /) -> int:
        """Write what the disk takes; return the size of all."""
        left = view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._lost_bytes:
                super().write(f"[{self._lost_bytes} bytes of output were lost: {self._why}]\n".encode())
                self._lost_bytes = 0
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            self._lost_bytes += len(left)
            self._why = error.strerror or str(error)
        return len(view)


class Narration:
    """Prints lines in their order without making the caller wait."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Have a line printed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="narration", daemon=True)
            self._thread.start()
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all is printed, if the disk takes it soon."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(LEAVE_S)
            self._thread = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            print(printable_lines(line), file=sys.stdout, flush=True)
