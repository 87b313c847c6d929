"""Reading the curves of other runs than the followed one, in portions between two frames."""

from __future__ import annotations

from time import perf_counter

from gputrain_tui.console.live import PORTION_BYTES
from gputrain_tui.history.comparison import CurveHistory
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import ENDED


class CurveReader:
    """Reader of one run's curves, in portions."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = CurveHistory(run.status.world_size)
        self.behind = True
        """Whether a part of the record is still to be read."""
        self._reader = RunReader(run.dir)

    def poll(self, deadline: float) -> bool:
        """Read appended events until about ``deadline`` (of ``perf_counter``); return whether anything changed."""
        if not self.behind and self.run.state in ENDED:
            return False  # the record is complete
        was_behind = self.behind
        has_events = False
        while True:
            events = self._reader.poll(PORTION_BYTES)
            for event in events:
                self.history.apply(event)
            has_events = has_events or bool(events)
            self.behind = self._reader.backlog_bytes > 0
            if not self.behind or perf_counter() >= deadline:
                return has_events or was_behind != self.behind

    def close(self) -> None:
        """Close the record."""
        self._reader.close()
