"""A standard stream that may close or fill up while a run goes on: what it does not take is dropped.

A pager that nobody scrolls, a terminal held by Ctrl-S, a ``tee`` that Ctrl-C has ended as well, a log on a full disk:
none is a reason to end a training, to end it without saving, or to leave a request to stop unheard.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from gputrain_tui.output import discard

GONE = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF})
"""How a stream says that nobody will ever read it again: a pipe's reader or the terminal is gone."""
ROOM_BYTES = 64 << 10
"""What waits for a reader at most, before more is not taken: as much again as a pipe holds."""
PATIENCE_S = 2.0
"""How long a reader that takes nothing keeps a command that was asked to end."""
PART_BYTES = 4 << 10
"""What is written at once; whether a reader gets on is seen in such parts."""


class SafeStream:
    """Writes to a stream from a thread of its own, without ever raising an ``OSError`` or making the caller wait."""

    def __init__(self, stream: TextIO) -> None:
        """Write to the stream's descriptor; the stream itself holds nothing back."""
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self.trouble: OSError | None = None
        """What the stream answered when it last refused; None when it never did."""
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._writing = 0
        """Bytes that the thread has taken and the stream has not."""
        self._moved_at = time.monotonic()
        """When the reader last took anything, or had nothing to take."""
        self._given_up = False
        self._thread: threading.Thread | None = None

    @property
    def backlog_bytes(self) -> int:
        """What the reader has yet to take."""
        return len(self._waiting) + self._writing

    @property
    def has_room(self) -> bool:
        """Whether more may be written without piling up."""
        return self.backlog_bytes < ROOM_BYTES

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to write, or nobody waits for it any more."""
        return self._given_up or not self.backlog_bytes

    def write(self, text: str) -> None:
        """Write; what a reader that stands still has no room for is dropped."""
        if self.has_room:
            self.pass_on(text.encode(self._encoding, "backslashreplace"))

    def flush(self) -> None:
        """Do nothing: all is written as soon as the stream takes it."""

    def line(self, text: str) -> None:
        """Write one line, also behind what waits for a reader that stands still."""
        self.pass_on((text + "\n").encode(self._encoding, "backslashreplace"))

    def pass_on(self, data: bytes) -> None:
        """Write bytes, all of them however long that takes."""
        with self._changed:
            if self._given_up or not data:
                return
            if not self.backlog_bytes:
                self._moved_at = time.monotonic()
            self._waiting += data
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: a stream that nobody reads must not keep the process either.
            self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
            self._thread.start()

    def stands_still(self) -> bool:
        """Whether a reader has taken nothing for longer than anybody who wants to leave would wait."""
        with self._changed:
            return self.backlog_bytes > 0 and time.monotonic() - self._moved_at > PATIENCE_S

    def give_up(self) -> None:
        """Drop what waits, and all that comes."""
        with self._changed:
            self._given_up = True
            self._waiting.clear()

    def settle(self, *, hurried: Callable[[], bool]) -> None:
        """Wait until everything is written.

        Args:
            hurried: whether the command was asked to end, so that it waits no longer for a reader that stands still.
        """
        with self._changed:
            while self.backlog_bytes and not (hurried() and self.stands_still()):
                self._changed.wait(0.1)  # signals are heard in between
        self.give_up()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                part = bytes(self._waiting[:PART_BYTES])
                del self._waiting[:PART_BYTES]
                self._writing = len(part)
            trouble = self._written(part)
            with self._changed:
                self._writing = 0
                self._moved_at = time.monotonic()
                self.trouble = trouble or self.trouble
                self._changed.notify_all()

    def _written(self, part: bytes) -> OSError | None:
        """Write a part; return what the stream answered when it refused."""
        view = memoryview(part)
        while view and not self._given_up:
            try:
                view = view[os.write(self._stream.fileno(), view) :]
            except OSError as error:
                if error.errno in GONE:
                    discard(self._stream)
                return error
            self._writing = len(view)
            self._moved_at = time.monotonic()
        return None
