"""Captures standard error while the screen is in use: NVML, CUDA and other libraries write to descriptor 2.

The screen gets a descriptor of its own; what was written to the other one meanwhile is shown after the screen is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.contract.errors import printable_lines

SHOWN_BYTES = 16 << 10
"""Bytes of the captured text shown at the end: the last ones."""
KEPT_BYTES = 1 << 20
"""Bytes captured before they are dropped, so that a week of warnings fills no memory."""

_DRAWN_ON = "__stderr__"
"""The attribute of ``sys`` from which Textual takes the terminal."""


@contextmanager
def guarded() -> Iterator[None]:
    """Redirect descriptor 2 to memory while the screen is in use."""
    sys.stderr.flush()
    terminal = os.dup(2)
    screen = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    kept = os.memfd_create("stderr")
    original = sys.__stderr__
    setattr(sys, _DRAWN_ON, screen)
    os.dup2(kept, 2)
    os.set_inheritable(2, True)
    try:
        yield
    finally:
        sys.stderr.flush()
        setattr(sys, _DRAWN_ON, original)
        os.dup2(terminal, 2)
        os.set_inheritable(2, True)
        os.close(terminal)
        _show(kept)
        os.close(kept)
        screen.close()


def trim() -> None:
    """Drop the captured text when it exceeds ``KEPT_BYTES``."""
    if os.isatty(2):
        return
    status = os.fstat(2)
    if status.st_nlink == 0 and status.st_size > KEPT_BYTES:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _show(kept: int) -> None:
    size = os.fstat(kept).st_size
    written = os.pread(kept, SHOWN_BYTES, max(0, size - SHOWN_BYTES))
    if written:
        text = printable_lines(written.decode("utf-8", "backslashreplace"))
        os.write(2, text.encode("utf-8", "backslashreplace"))
