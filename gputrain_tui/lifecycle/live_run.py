"""Following one run: its record is read in portions into state and series."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gputrain_tui.history.hardware_series import HardwareSeries
from gputrain_tui.history.known_ranks import KnownRanks
from gputrain_tui.history.log_times import LogTimes
from gputrain_tui.history.lost_run import lost_text
from gputrain_tui.history.metric_curves import MetricCurves
from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.replay import replay
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.series import Series
from gputrain_tui.history.status_file import ENDED, Status, as_recorded, elapsed_of, read_status, state_of
from gputrain_tui.hosts.host_names import is_pending
from gputrain_tui.lifecycle.remote_nodes import remote_node
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from gputrain_tui.state.standstill import Standstill, StepWatch
from trainer.contract.errors import RecordError
from trainer.contract.record import AnyEvent, Metrics, NodeSample, NoiseScale, RunEnded, Step, World
from trainer.contract.record.checkpoints import checkpoints_in
from trainer.contract.record.downsampled import DownsampledBlock
from trainer.contract.record.regular_file import size_of

POLL_BUDGET_S = 0.02
"""Seconds that one poll may take, so that keys are handled in time."""
FIRST_POLL_BUDGET_S = 0.1
"""Seconds of the poll before a run's first frame: enough for every downsampled record, so that the frame is complete.

A frame of an earlier step would take as long to paint as the rest of the record takes to read.
"""
BACKLOG_PAUSE_S = 0.004
"""Seconds between two polls of a backlog, during which keys are handled."""
PORTION_BYTES = 256 << 10
"""Bytes per read; parsing them takes a small part of the budget."""
STATUS_INTERVAL_S = 1.0
"""Seconds between two reads of ``status.json``; only there can a killed supervisor be detected."""


class LiveRun:
    """State and series of a followed run: ``poll`` updates them, ``version`` changes with them."""

    def __init__(
        self,
        run: Run,
        *,
        source: RunReader | None = None,
        on_step: Callable[[Step], None] | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Follow a run from its directory, or from a ``source`` of events; ``clock`` measures the budget.

        ``on_step`` is called with each step event or downsampled block, besides.
        """
        self.run = run
        self._on_step = on_step
        self.now = now
        self.plan = _plan(run)
        self.state = self._new_state()
        recorded = KnownRanks(run.dir).count if self.plan is not None else self.state.world_size
        self.series = Series(recorded, self.state.synchronised)
        self.hardware = HardwareSeries()
        self.metrics = MetricCurves()
        self.caught_up = False
        """Whether the whole record was read once; until then the state is a past one."""
        replayed = replay(run.dir, recorded, newest=self.state.world_size) if source is None else None
        begin = replayed.begin if replayed is not None else None
        self._is_whole = replayed is None
        """Whether every sample of the nodes is read; a downsampled record has only the newest ones."""
        self._source = RunReader(run.dir, begin=begin) if source is None else source
        self._clock = clock
        self._total_bytes = 0
        self._read_bytes = 0
        self._status: Status = run.status
        self._status_at = float("-inf")
        self._is_deleted = False
        self._revision = 0
        self._steps = StepWatch()
        self.log_times: dict[str, LogTimes] = {}
        """Times at which each log's bytes were written, by the log's name."""
        if replayed is not None:
            self.series.coarsen(replayed.steps)
            self._apply(replayed.events)
            self.series.refine()

    @property
    def version(self) -> int:
        """Number that changes with the state and the status."""
        return (self._revision << 40) + self.state.version

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def status(self) -> str:
        """Status of the run, such as ``running``, ``stopping`` or ``failed``; ``lost``: its supervisor was killed.

        ``deleted``: its directory is gone. An end is known at once, also while the record before it is still read.
        """
        if self._is_deleted:
            return "deleted"
        if self.state.ended is not None:
            return self.state.ended.status
        status = state_of(self._status)
        return self.state.status if status in ("queued", "starting") else status

    @property
    def end_text(self) -> str:
        """State of a rank that recorded no end, once the run is over; empty while it goes on."""
        return "" if not self.over else "ended" if self.status in ENDED else "unknown"

    @property
    def over(self) -> bool:
        """Whether the run has ended, is lost or was deleted: its record does not grow any more."""
        return self.status in (*ENDED, "lost", "deleted")

    @property
    def can_resume(self) -> bool:
        """Whether the run ended early and left a checkpoint; a script's own ones are not in the record."""
        if not self.over or self.status in ("finished", "deleted") or self._status.archived is not None:
            return False
        saved = reversed(self.state.checkpoints)
        if remote_node(self.run.dir, 0) is not None:  # its files are on that host
            return next(saved, None) is not None
        return bool(checkpoints_in(self.run.dir.checkpoints)) or any(Path(each.path).exists() for each in saved)

    @property
    def message(self) -> str | None:
        """Why the run failed or is lost, or which processes were left."""
        return self._status.message or lost_text(self.run.dir, self._status) or None

    @property
    def record_gap(self) -> str:
        """Why the record is not whole, as its events tell and its lines show; empty where it is."""
        count = self._source.damaged_lines + (self.over and self.caught_up and self._source.has_torn_end)
        damage = f"{count:,} line{'s' * (count != 1)} of it cannot be read: damaged, or cut off" if count else ""
        closed = [f"{name} cannot be read: {why}" for name, why in sorted(self._source.unreadable.items())]
        if len(closed) > 2:
            closed = [f"{len(closed):,} files of it cannot be read, such as {closed[0].replace(' cannot be read', '')}"]
        return "; ".join(filter(None, (self.state.record_gap, damage, *closed)))

    @property
    def reading(self) -> float | None:
        """Share of the record read so far, 0 to 1; None once all of it was read."""
        if self.caught_up or not self._total_bytes:
            return None
        return min(self._read_bytes / self._total_bytes, 1.0)

    @property
    def standstill(self) -> Standstill | None:
        """Standstill of the run; None while steps come, and after its end."""
        if self.over or not self.caught_up:
            return None
        return self._steps.standstill(self.state, self.now())

    @property
    def elapsed_s(self) -> float | None:
        """Duration of the run until now or its end, seconds."""
        if self.state.ended is not None and self.state.started is not None:
            return self.state.elapsed_s
        if not self._status.started:
            return None
        return elapsed_of(self._status, (self.state.time or self._status.started) if self.over else self.now())

    def poll(self, budget_s: float = POLL_BUDGET_S) -> bool:
        """Read appended events for about ``budget_s``; return whether there is a backlog."""
        now = self._clock()
        self._check_status(now)
        deadline = now + budget_s
        if not self.caught_up and not self._total_bytes:
            self._total_bytes = _size(self.run)
        while True:
            self._apply(self._source.poll(PORTION_BYTES))
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
        status = self._status
        if self.state.ended is None and status.by_hand and status.status in ENDED:  # no supervisor has recorded it
            ended, how, code = status.ended or self.state.time, status.status, status.exit_code or 0
            self._apply([RunEnded(time=ended, status=how, exit_code=code, message=status.message)])  # type: ignore[arg-type]
        return False

    def close(self) -> None:
        self._source.close()

    def _apply(self, events: Sequence[AnyEvent | DownsampledBlock]) -> None:
        for event in events:
            self.state.apply(event)
            if isinstance(event, Step):
                self.series.apply(event)
                if self._on_step is not None:
                    self._on_step(event)
            elif isinstance(event, World):
                self.series.change_world(event.world_size)
            elif isinstance(event, NodeSample):
                self.hardware.apply(event)
                self._date_logs(event)
            elif isinstance(event, Metrics | NoiseScale):
                self.metrics.apply(event)
        if events and isinstance(events[-1], RunEnded):
            self.series.flush()

    def _date_logs(self, sample: NodeSample) -> None:
        of_ranks = [(str(rank.rank), rank.log_bytes) for rank in sample.ranks]
        for name, size in [(f"node-{sample.node}", sample.log_bytes), *of_ranks]:
            if size is not None:
                times = self.log_times.get(name)
                if times is None:
                    times = self.log_times[name] = LogTimes(self.state.world_size, whole=self._is_whole)
                times.note(size, sample.time)

    def _check_status(self, now: float) -> None:
        if now - self._status_at < STATUS_INTERVAL_S:
            return
        self._status_at = now
        status = read_status(self.run.dir)
        is_deleted = status is None and _is_gone(self.run.dir.path)
        if is_deleted != self._is_deleted:
            self._is_deleted = is_deleted
            self._revision += 1
        if status is None and not is_deleted and self._status.by_hand:
            status = as_recorded(self.run.dir, self._status)
        if status is not None and status != self._status:
            self._status = status
            self._revision += 1
            self.run = open_run(self.run.dir.path) or self.run

    def _new_state(self) -> RunState:
        """Return the state before any event, with hosts and local ranks of the plan."""
        planned = self.run.status.world_size if self.plan is None else self.plan.world_size
        state = RunState(world_size=planned)
        for node in self.plan.nodes if self.plan is not None else ():
            for local_rank, rank in enumerate(node.ranks):
                view = state.rank(rank)
                view.node, view.local_rank = node.node, local_rank
                view.host = None if is_pending(node.host) else node.host
        return state


def _plan(run: Run) -> Plan | None:
    with suppress(RecordError):
        return read_plan(run.dir)
    return None


def _is_gone(path: Path) -> bool:
    try:
        return not path.is_dir()
    except OSError:
        return False  # an error of a network file system, which may recover


def _size(run: Run) -> int:
    """Return the total size of a run's event files, bytes."""
    with suppress(OSError), os.scandir(run.dir.events) as entries:
        return sum(size_of(entry.path) for entry in entries)
    return 0
