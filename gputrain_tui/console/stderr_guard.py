"""Capture of standard error while the console runs: NVML, CUDA and other libraries write to descriptor 2.

Textual draws on a descriptor of its own; the captured text is shown after the console has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.contract.errors import printable_lines

KEPT_BYTES = 1 << 20
"""Bytes beyond which ``trim`` drops the captured text, so that a week of warnings does not fill the memory."""

_DRAWN_ON = "__stderr__"
"""Attribute of ``sys`` with the stream on which Textual draws."""


@contextmanager
def guarded() -> Iterator[None]:
    """Redirect descriptor 2 to memory within the block, and show the end of the captured text afterwards."""
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
    """Drop the captured text if it exceeds ``KEPT_BYTES``."""
    if os.isatty(2):
        return
    status = os.fstat(2)
    if status.st_nlink == 0 and status.st_size > KEPT_BYTES:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _show(kept: int) -> None:
    size = os.fstat(kept).st_size
    shown_bytes = 16 << 10  # bytes of the captured text that are shown, the last ones
    written = os.pread(kept, shown_bytes, max(0, size - shown_bytes))
    if written:
        text = printable_lines(written.decode("utf-8", "backslashreplace"))
        os.write(2, text.encode("utf-8", "backslashreplace"))
