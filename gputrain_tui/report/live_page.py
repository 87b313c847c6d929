"""The newest report and charts of one run for all its viewers: one thread reads the record, while anybody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gputrain_tui.history.run_folders import Run
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.page import page_data
from gputrain_tui.report.run_charts import run_charts
from gputrain_tui.report.run_report import run_report
from gputrain_tui.report.step_blocks import StepBlocks

INTERVAL_S = 1.25
"""Seconds between two reads of a record: a step is shown within 2 s."""
LINGER_S = 10.0
"""Seconds for which a record is still read after its last viewer: a page that is loaded anew finds it."""
LIVE_COLUMNS = 300
"""Columns of the curves of a page that is sent again and again."""


class LivePage:
    """Data of a run's page, read anew while there are viewers."""

    def __init__(self, run: Run, *, on_unused: Callable[[], None]) -> None:
        """Read the record; ``on_unused`` is called once the last viewer is gone."""
        self._blocks = StepBlocks()
        self._live = read_run_record(run, on_step=self._blocks.apply)
        self._facts = run_facts(self._live)
        self._on_unused = on_unused
        self._changed = threading.Condition()
        self._viewers = 0
        self._is_followed = False
        self._shown = -1
        self.version = 0
        """Number of the newest data, from 1."""
        self.data = ""
        """Newest data, as ``page_data`` returns it."""
        self._build()

    def join(self) -> None:
        """Add a viewer; the first one starts the thread."""
        with self._changed:
            self._viewers += 1
            if not self._is_followed:
                self._is_followed = True
                threading.Thread(target=self._follow, name=f"page of {self._live.id}", daemon=True).start()

    def leave(self) -> None:
        """Remove a viewer."""
        with self._changed:
            self._viewers -= 1

    @property
    def has_viewers(self) -> bool:
        return self._viewers > 0

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait for data newer than ``version``; return whether there is any."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version > version, timeout_s)

    def close(self) -> None:
        """Close the record's files."""
        self._live.close()

    def _follow(self) -> None:
        idle_s = 0.0
        try:
            while idle_s < LINGER_S:
                time.sleep(INTERVAL_S)
                idle_s = 0.0 if self._viewers else idle_s + INTERVAL_S
                self._live.poll()
                if self._live.version != self._shown:
                    self._build()
        finally:  # also where the record is gone: the next viewer starts anew
            with self._changed:
                self._is_followed = False
            self._on_unused()

    def _build(self) -> None:
        live = self._live
        report = run_report(live.state, run_facts(live, known=self._facts))
        charts = run_charts(
            live.series, live.hardware, self._blocks, live.metrics, loss_unit=report.loss_unit, columns=LIVE_COLUMNS
        )
        data = page_data(report, charts)
        with self._changed:
            self._shown = live.version
            self.data = data
            self.version += 1
            self._changed.notify_all()
