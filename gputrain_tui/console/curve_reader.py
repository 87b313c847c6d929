"""Reads the curves of a run that is not the one on the screen, in portions between two frames."""

from __future__ import annotations

from time import perf_counter

from gputrain_tui.console.live import PORTION_BYTES
from gputrain_tui.history.compare import CurveHistory
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.runs import Run
from gputrain_tui.history.status_file import ENDED


class CurveReader:
    """Reads the curves of one run in portions."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = CurveHistory(run.status.world_size)
        self.behind = True
        """Whether more is there than was read."""
        self._reader = RunReader(run.dir)

    def poll(self, deadline: float) -> bool:
        """Read what was appended, about until a time of ``perf_counter``; return whether anything changed."""
        if not self.behind and self.run.state in ENDED:
            return False  # nothing more will come
        was_behind = self.behind
        came = False
        while True:
            events = self._reader.poll(PORTION_BYTES)
            for event in events:
                self.history.apply(event)
            came = came or bool(events)
            self.behind = self._reader.backlog_bytes > 0
            if not self.behind or perf_counter() >= deadline:
                return came or was_behind != self.behind

    def close(self) -> None:
        """Close the record."""
        self._reader.close()
