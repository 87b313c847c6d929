"""The newest report and charts of a run for all its viewers: one thread reads the record, while anybody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gputrain_tui.history.run_folders import Run
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.page import page_data
from gputrain_tui.report.report_fields import RunReport
from gputrain_tui.report.run_charts import run_charts
from gputrain_tui.report.run_report import run_report
from gputrain_tui.report.step_blocks import StepBlocks

INTERVAL_S = 1.25
"""Seconds between two reads of a record: a step is shown within 2 s."""
LINGER_S = 10.0
"""Seconds for which a record is still read after its last viewer: a page that is loaded anew finds it."""
LIVE_COLUMNS = 160
"""Columns of the curves of a page that is sent again and again."""


class LivePage:
    """Data of a run's page; ``start`` reads the record for the first time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self.viewers = 0
        """Changed under the lock of ``LivePages``."""
        self.version = 0
        """Number of the newest data, from 1."""
        self.data = ""
        """Newest data, as ``page_data`` returns it."""
        self.report: RunReport | None = None
        """Newest report."""
        self.is_over = False
        """Whether the record is read no more; the next viewer gets another page."""

    def start(self) -> bool:
        """Read the whole record, unless it has been read; return whether this was the first time."""
        with self._starting:
            if self.version:
                return False
            self._blocks = StepBlocks()
            self._live = read_run_record(self._run, on_step=self._blocks.apply)
            self._facts = run_facts(self._live)
            self._build()
            return True

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait for data newer than ``version``; return whether there is any."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > version or self.is_over, timeout_s)
            return self.version > version

    def update(self) -> None:
        """Read what has been recorded since, all of it as far as reading keeps up: else a page would lag ever more."""
        self._live.poll(budget_s=INTERVAL_S)
        if self._live.version != self._shown:
            self._build()

    def close(self) -> None:
        """Close the record's files, and end the waiting of all viewers."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
        with self._starting:
            if self.version:
                self._live.close()

    def _build(self) -> None:
        live = self._live
        report = run_report(live.state, run_facts(live, known=self._facts))
        charts = run_charts(
            live.series, live.hardware, self._blocks, live.metrics, loss_unit=report.loss_unit, columns=LIVE_COLUMNS
        )
        data = page_data(report, charts)
        with self._changed:
            self._shown = live.version
            self.data, self.report = data, report
            self.version += 1
            self._changed.notify_all()


class LivePages:
    """The pages of the runs that have a viewer, or had one a moment ago."""

    def __init__(self) -> None:
        self._pages: dict[str, LivePage] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    @contextmanager
    def viewing(self, run: Run) -> Iterator[LivePage]:
        """Look at a run's page, which all its viewers share; others wait for none but their own run's record."""
        with self._lock:
            page = self._pages.setdefault(run.id, LivePage(run))
            page.viewers += 1
        try:
            if page.start():
                threading.Thread(target=self._follow, args=(run, page), name=f"page of {run.id}", daemon=True).start()
            yield page
        finally:
            with self._lock:
                page.viewers -= 1
                if not (page.viewers or page.version):  # the record could not be read
                    self._pages.pop(run.id, None)

    def _follow(self, run: Run, page: LivePage) -> None:
        viewed = time.monotonic()
        try:
            while run.dir.path.exists():
                time.sleep(INTERVAL_S)
                page.update()
                with self._lock:
                    if page.viewers:
                        viewed = time.monotonic()
                    elif time.monotonic() - viewed > LINGER_S:
                        # Under the same lock, so that whoever comes now gets a page that is followed.
                        del self._pages[run.id]
                        return
        finally:
            with self._lock:
                if self._pages.get(run.id) is page:
                    del self._pages[run.id]
            page.close()
