"""A standard stream that may go away or fill up while a run goes on: what it does not take is dropped, the run stays.

A terminal that was closed, a ``tee`` that Ctrl-C has ended as well, a log on a full disk: none is a reason to end a
training, or to end it without saving.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TextIO

GONE = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF})
"""How a stream says that nobody will ever read it again: a pipe's reader or the terminal is gone."""


class Outlet:
    """Writes text to a stream without ever raising an ``OSError``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.trouble: OSError | None = None
        """What the stream answered when it last refused; None when it never did."""

    def write(self, text: str) -> None:
        """Write, as far as the stream takes it."""
        self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Write out what is held back, as far as the stream takes it."""
        self._try(self._stream.flush)

    def line(self, text: str) -> None:
        """Write one line at once."""
        self.write(text + "\n")
        self.flush()

    def settle(self) -> None:
        """Leave nothing behind that the interpreter would fail to write at its end, and tell by an exit code."""
        refused, self.trouble = self.trouble, None
        self.flush()
        if self.trouble is not None:
            silence(self._stream)
        self.trouble = self.trouble or refused

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.trouble = error
            if error.errno in GONE:
                silence(self._stream)


def silence(stream: TextIO) -> None:
    """Send what the stream still holds, and all that will be written to it, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
