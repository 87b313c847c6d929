"""Progress bar of an export, on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time

from gputrain_tui.tables import duration, size

REDRAW_S = 0.1
"""Time between two redraws: faster changes cannot be read."""
FIRST_DRAWN_S = 0.3
"""Time before the first drawing, so that a short export shows no flickering bar."""
BAR_COLUMNS = 30
"""Width of the bar; the rest of 80 columns is for text."""


class ExportProgress:
    """Progress bar on standard error, erased at the end; without output if that is no terminal."""

    def __init__(self, title: str) -> None:
        self.total_bytes = 0
        """Bytes to read; 0 until known."""
        self._title = title
        self._done = 0
        self._began = time.monotonic()
        self._drawn_at = self._began + FIRST_DRAWN_S - REDRAW_S
        self._stream = getattr(sys.stderr, "unfiltered", sys.stderr)
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = False

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._live and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._drawn = True
            self._stream.write(f"\r{self._line(now)}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False

    def _line(self, now: float) -> str:
        share = min(self._done / self.total_bytes, 1.0) if self.total_bytes else 0.0
        cells = round(share * BAR_COLUMNS)
        left_s = (now - self._began) * (1 / share - 1) if share > 0.01 else None
        left = f"  {duration(left_s)} left" if left_s is not None else ""
        bar = "━" * cells + "─" * (BAR_COLUMNS - cells)
        line = f"{self._title}  {bar}  {share:4.0%}  {size(self._done)}{left}"
        return line[: shutil.get_terminal_size().columns - 1]
