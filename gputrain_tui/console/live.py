"""Follows one run for the console: reads its record in portions into state and series."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gputrain_tui.history.hardware_series import HardwareSeries
from gputrain_tui.history.log_times import LogTimes
from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.replay import replay
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.runs import Run, open_run
from gputrain_tui.history.series import Series
from gputrain_tui.history.status_file import ENDED, Status, read_status, state_of
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from gputrain_tui.state.standstill import Standstill, StepWatch
from trainer.contract.errors import RecordError
from trainer.contract.record import AnyEvent, NodeSample, RunEnded, Step
from trainer.contract.record.downsampled import DownsampledBlock
from trainer.contract.record.regular_file import size_of

POLL_BUDGET_S = 0.02
"""Seconds one poll may take, so that keys are handled."""
FIRST_POLL_BUDGET_S = 0.1
"""Seconds of the poll before a run's first frame, which is then complete for every downsampled record: painting an
earlier step first takes as long as reading on."""
BACKLOG_PAUSE_S = 0.004
"""Seconds between two polls of a backlog, in which keys are handled."""
PORTION_BYTES = 256 << 10
"""Bytes per read, small against the budget."""
STATUS_INTERVAL_S = 1.0
"""Seconds between two reads of ``status.json``, which alone shows a killed supervisor."""


class LiveRun:
    """State and series of a run: ``poll`` updates them, ``version`` changes with them."""

    def __init__(
        self,
        run: Run,
        *,
        source: RunReader | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Follow a run from its directory, or from a ``source`` of events; ``clock`` measures the budget."""
        self.run = run
        self.now = now
        self.plan = _plan(run)
        self.state = self._new_state()
        self.series = Series(self.state.world_size)
        self.hardware = HardwareSeries()
        self.caught_up = False
        """Whether the whole record was read once; before, what is shown is the past."""
        known = replay(run.dir, self.state.world_size) if source is None else None
        begin = known.begin if known is not None else None
        self._source = RunReader(run.dir, begin=begin) if source is None else source
        self._clock = clock
        self._total_bytes = 0
        self._read_bytes = 0
        self._status: Status = run.status
        self._status_at = float("-inf")
        self._revision = 0
        self._steps = StepWatch()
        self.log_times: dict[str, LogTimes] = {}
        """When the lines of each rank's log were written, by the log's name."""
        if known is not None:
            self.series.coarsen(known.steps)
            self._apply(known.events)
            self.series.refine()

    @property
    def version(self) -> int:
        """Changes with everything that is shown."""
        return (self._revision << 40) + self.state.version

    @property
    def id(self) -> str:
        """The run's id."""
        return self.run.id

    @property
    def status(self) -> str:
        """``starting``, ``running``, ``stopping``, how it ended, or ``lost``."""
        if self.state.ended is not None:
            return self.state.ended.status
        status = state_of(self._status)
        if status in ENDED and not self.caught_up:
            return self.state.status  # its end stands in what is still to be read
        return self.state.status if status in ("queued", "starting") else status

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.status in ENDED or self.status == "lost"

    @property
    def message(self) -> str | None:
        """The supervisor's closing message."""
        return self._status.message

    @property
    def reading(self) -> float | None:
        """Share of the record that was read, 0 to 1, while it is being read for the first time."""
        if self.caught_up or not self._total_bytes:
            return None
        return min(self._read_bytes / self._total_bytes, 1.0)

    @property
    def standstill(self) -> Standstill | None:
        """How long no step has come; None while they come, and once the run is over."""
        if self.over or not self.caught_up:
            return None
        return self._steps.standstill(self.state, self.now())

    @property
    def elapsed_s(self) -> float | None:
        """Duration of the run until now or its end, seconds."""
        started = self.state.started or self._status.started or None
        if started is None:
            return None
        if self.over:
            end = self._status.ended or self.state.time or started
            return max(0.0, end - started)
        return max(0.0, self.now() - started)

    def poll(self, budget_s: float = POLL_BUDGET_S) -> bool:
        """Read appended events for about ``budget_s``; return whether there is a backlog."""
        now = self._clock()
        self._check_status(now)
        deadline = now + budget_s
        if not self.caught_up and not self._total_bytes:
            self._total_bytes = _size(self.run)
        while True:
            events = self._source.poll(PORTION_BYTES)
            self._apply(events)
            self._steps.note(self.state, self.now(), live=self.caught_up)
            backlog = self._source.backlog_bytes
            self._read_bytes = max(self._total_bytes - backlog, self._read_bytes)
            if not backlog:
                break
            if self._clock() >= deadline:
                self._revision += 1
                return True
        if not self.caught_up:
            self.caught_up = True
            self._revision += 1
        return False

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _apply(self, events: Sequence[AnyEvent | DownsampledBlock]) -> None:
        """Put events into state and curves."""
        for event in events:
            self.state.apply(event)
            if isinstance(event, Step | DownsampledBlock):
                self.series.apply(event)
            elif isinstance(event, NodeSample):
                self.hardware.apply(event)
                self._date_logs(event)
        if events and isinstance(events[-1], RunEnded):
            self.series.flush()

    def _date_logs(self, sample: NodeSample) -> None:
        for rank in sample.ranks:
            if rank.log_bytes is not None:
                times = self.log_times.get(name := str(rank.rank))
                if times is None:
                    times = self.log_times[name] = LogTimes(self.state.world_size)
                times.note(rank.log_bytes, sample.time)

    def _check_status(self, now: float) -> None:
        if now - self._status_at < STATUS_INTERVAL_S:
            return
        self._status_at = now
        status = read_status(self.run.dir)
        if status is not None and status != self._status:
            self._status = status
            self._revision += 1
            self.run = open_run(self.run.dir.path) or self.run

    def _new_state(self) -> RunState:
        """Return the state before any event: hosts and local ranks come from the plan."""
        planned = self.run.status.world_size if self.plan is None else self.plan.world_size
        state = RunState(world_size=planned)
        for node in self.plan.nodes if self.plan is not None else ():
            for local_rank, rank in enumerate(node.ranks):
                view = state.rank(rank)
                view.node, view.host, view.local_rank = node.node, node.host, local_rank
        return state


def _plan(run: Run) -> Plan | None:
    with suppress(RecordError):
        return read_plan(run.dir)
    return None


def _size(run: Run) -> int:
    """Return the bytes of a run's event files."""
    with suppress(OSError), os.scandir(run.dir.events) as entries:
        return sum(size_of(entry.path) for entry in entries)
    return 0
