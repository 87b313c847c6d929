"""Standard stream that never blocks the run, nor raises: a stalled or closed reader loses output instead.

Such as a pager at its prompt, a terminal held by Ctrl-S, a ``tee`` ended by Ctrl-C or a log on a full disk: none may
end a training, keep it from saving, or delay a stop request.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from gputrain_tui.output import discard

CLOSED_ERRORS = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF})
MAX_BACKLOG_BYTES = 64 << 10
"""Backlog above which text is dropped; the size of a pipe's buffer."""
STALL_S = 2.0
"""Time without progress after which an interrupted command does not wait for its reader."""
WRITE_BYTES = 4 << 10
"""Bytes per write: the granularity at which the progress of a slow reader is seen."""


class SafeStream:
    """Stream written by a thread of its own; never raises ``OSError`` and never blocks the caller."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self.error: OSError | None = None
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._writing = 0
        self._progress_at = time.monotonic()
        """Time of the reader's last progress, or of the first byte of the backlog; monotonic seconds."""
        self._abandoned = False
        self._thread: threading.Thread | None = None

    @property
    def backlog_bytes(self) -> int:
        return len(self._waiting) + self._writing

    @property
    def has_room(self) -> bool:
        return self.backlog_bytes < MAX_BACKLOG_BYTES

    @property
    def is_written(self) -> bool:
        """Whether everything is written or abandoned."""
        return self._abandoned or not self.backlog_bytes

    def write(self, text: str) -> None:
        """Write text; drop it if the backlog is full."""
        if self.has_room:
            self.write_bytes(text.encode(self._encoding, "backslashreplace"))

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as the stream is ready."""

    def line(self, text: str) -> None:
        """Write one line, even if the backlog is full."""
        self.write_bytes((text + "\n").encode(self._encoding, "backslashreplace"))

    def write_bytes(self, data: bytes) -> None:
        """Write bytes, even if the backlog is full."""
        with self._changed:
            if self._abandoned or not data:
                return
            if not self.backlog_bytes:
                self._progress_at = time.monotonic()
            self._waiting += data
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: a stalled stream must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="safe-stream", daemon=True)
            self._thread.start()

    def is_stalled(self) -> bool:
        """Whether there is a backlog of which nothing was read for ``STALL_S``."""
        with self._changed:
            return self.backlog_bytes > 0 and time.monotonic() - self._progress_at > STALL_S

    def abandon(self) -> None:
        """Drop the backlog, and everything that is written later."""
        with self._changed:
            self._abandoned = True
            self._waiting.clear()

    def drain(self, *, is_interrupted: Callable[[], bool]) -> None:
        """Wait until everything is written, or while ``is_interrupted`` returns True until the reader stalls."""
        with self._changed:
            while self.backlog_bytes and not (is_interrupted() and self.is_stalled()):
                self._changed.wait(0.1)  # in short waits, so that signal handlers run

    def close(self, *, is_interrupted: Callable[[], bool]) -> None:
        """Wait as ``drain`` does, and drop what is left and everything that is written later."""
        self.drain(is_interrupted=is_interrupted)
        self.abandon()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                chunk = bytes(self._waiting[:WRITE_BYTES])
                del self._waiting[:WRITE_BYTES]
                self._writing = len(chunk)
            error = self._write_chunk(chunk)
            with self._changed:
                self._writing = 0
                self._progress_at = time.monotonic()
                self.error = error or self.error
                self._changed.notify_all()

    def _write_chunk(self, chunk: bytes) -> OSError | None:
        """Write a chunk; return the error of the stream, if any."""
        view = memoryview(chunk)
        while view and not self._abandoned:
            try:
                view = view[os.write(self._stream.fileno(), view) :]
            except OSError as error:
                if error.errno in CLOSED_ERRORS:
                    discard(self._stream)
                return error
            self._writing = len(view)
            self._progress_at = time.monotonic()
        return None
