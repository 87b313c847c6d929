"""Follows one run for the console: reads its record in small portions into the state that views show."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gputrain_tui.history.replay import replay
from gputrain_tui.history.runs import ENDED, Run, RunReader, Status, open_run, read_plan, read_status, state_of
from gputrain_tui.history.series import Series
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from trainer.contract.errors import RecordError
from trainer.contract.record import AnyEvent, RunEnded, Step
from trainer.contract.record.downsampled import DownsampledBlock
from trainer.contract.record.regular_file import size_of

BUDGET_S = 0.02
"""How long one poll may take while the person may press a key."""
PORTION_BYTES = 256 << 10
"""What is asked of the reader at a time, so that the budget is kept."""
STATUS_S = 1.0
"""How often ``status.json`` is looked at: it tells what no event does, such as a killed supervisor."""
QUIET_S = 3.0
"""After this long without an event the record is looked at less often."""
QUIET_POLL_S = 0.3
OVER_POLL_S = 2.0
"""How often the record of a run that has ended is looked at: it may be resumed in place."""


class EventSource(Protocol):
    """Gives the events that were appended since it was asked last."""

    @property
    def backlog_bytes(self) -> int:
        """What the last poll left for the next."""

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        """Return the new events in the order of their times."""

    def close(self) -> None:
        """Let go of the files."""


class LiveRun:
    """A run's state and curves; ``poll`` moves them on, ``version`` tells whether there is anything new to see."""

    def __init__(
        self,
        run: Run,
        *,
        source: EventSource | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Follow a run.

        Args:
            run: as it was found.
            source: of its events; by default its run directory.
            now: Unix seconds.
            clock: seconds, for the budget.
        """
        self.run = run
        self.now = now
        self.plan = _plan(run)
        self.state = self._new_state()
        self.series = Series(self.state.world_size)
        self.caught_up = False
        """Whether the whole record was read once; before, what is shown is the past."""
        known = replay(run.dir, self.state.world_size) if source is None else None
        begin = known.begin if known is not None else None
        self._source: EventSource = RunReader(run.dir, begin=begin) if source is None else source
        self._clock = clock
        self._total_bytes = 0
        self._read_bytes = 0
        self._status: Status = run.status
        self._status_at = float("-inf")
        self._next_poll = float("-inf")
        self._heard_at = float("-inf")
        self._turns = 0
        if known is not None:
            self.series.coarsen(known.steps)
            self._apply(known.events)
            self.series.refine()

    @property
    def version(self) -> int:
        """Moves with everything that is to be seen."""
        return (self._turns << 40) + self.state.version

    @property
    def id(self) -> str:
        """The run's id."""
        return self.run.id

    @property
    def status(self) -> str:
        """``starting``, ``running``, ``stopping``, how it ended, or ``lost``."""
        if self.state.ended is not None:
            return self.state.ended.status
        told = state_of(self._status)
        if told in ENDED and not self.caught_up:
            return self.state.status  # its end stands in what is still to be read
        return self.state.status if told == "starting" else told

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.status in ENDED or self.status == "lost"

    @property
    def message(self) -> str | None:
        """What the supervisor says at the end."""
        return self._status.message

    @property
    def reading(self) -> float | None:
        """Share of the record that was read, 0 to 1, while it is being read for the first time."""
        if self.caught_up or not self._total_bytes:
            return None
        return min(self._read_bytes / self._total_bytes, 1.0)

    @property
    def elapsed_s(self) -> float | None:
        """How long the run lasts, or lasted."""
        started = self.state.started or self._status.started or None
        if started is None:
            return None
        if self.over:
            end = self._status.ended or self.state.time or started
            return max(0.0, end - started)
        return max(0.0, self.now() - started)

    def poll(self, budget_s: float = BUDGET_S) -> bool:
        """Take in what was appended, for about so long; return whether more is waiting."""
        now = self._clock()
        if now < self._next_poll:
            return False
        self._look_at_status(now)
        deadline = now + budget_s
        if not self.caught_up and not self._total_bytes:
            self._total_bytes = _size(self.run)
        while True:
            events = self._source.poll(PORTION_BYTES)
            self._apply(events)
            backlog = self._source.backlog_bytes
            self._read_bytes = max(self._total_bytes - backlog, self._read_bytes)
            if events:
                self._heard_at = now
            if not backlog:
                break
            if self._clock() >= deadline:
                self._turns += 1
                return True
        if not self.caught_up:
            self.caught_up = True
            self._turns += 1
        if self.over:
            self._next_poll = now + OVER_POLL_S
        elif now - self._heard_at > QUIET_S:
            self._next_poll = now + QUIET_POLL_S
        return False

    def close(self) -> None:
        """Let go of the files."""
        self._source.close()

    def _apply(self, events: Sequence[AnyEvent | DownsampledBlock]) -> None:
        """Put events into state and curves."""
        for event in events:
            self.state.apply(event)
            if isinstance(event, Step | DownsampledBlock):
                self.series.apply(event)
        if events and isinstance(events[-1], RunEnded):
            self.series.flush()

    def _look_at_status(self, now: float) -> None:
        if now - self._status_at < STATUS_S:
            return
        self._status_at = now
        status = read_status(self.run.dir)
        if status is not None and status != self._status:
            self._status = status
            self._turns += 1
            self.run = open_run(self.run.dir.path) or self.run

    def _new_state(self) -> RunState:
        """Return the state of a run of which only the plan is known: it says where ranks will be."""
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
