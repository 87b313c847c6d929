"""Reads every single step that the ranks of a run have recorded, in bounded memory, also while the run goes on.

An event of fast steps covers several. It has the loss, the time and the exposed synchronisation of each of them; its
other numbers are means over all of them, which each of its steps then repeats.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from gputrain_tui.history.follow import AppendedFile, by_rank
from gputrain_tui.history.run_folders import Run
from gputrain_tui.state.counted_anew import begins_at_1
from trainer.contract.record import (
    AnyEvent,
    Lost,
    Metrics,
    RankState,
    ShareChange,
    Step,
    TrainingPlan,
    decode_events,
    single_steps,
)
from trainer.contract.record.regular_file import read_part, size_of
from trainer.host.resource_limits import open_files

GOING = ("queued", "starting", "running", "stopping")
"""States of a run that may be writing its last lines."""
MAX_GAPS = 3
"""Gaps that are listed for a rank; all missing steps are counted."""
READ_BYTES = (16 << 10, 1 << 20)
"""Minimum, for many ranks side by side, and maximum number of bytes read of one file at a time."""
SIDE_BY_SIDE_BYTES = 16 << 20
"""Bytes read of all files together where they are read side by side; decoded events take about twenty times as much
memory."""
MAX_STEPS_PER_EVENT = 1 << 16
"""More than the fastest steps of half a second; a larger number is damage, and would become as many lines."""
MAX_BYTES_WITHOUT_EVENT = 64 << 20
"""Limit after which a file is damaged, and read no further."""


class SingleStep(NamedTuple):
    """One optimizer step of one rank."""

    attempt: int
    """Number of the rank's attempt, from 1; steps that a restart repeats are in both attempts."""
    averaged_over: int
    """Steps over which the fields besides ``SINGLE_VALUES`` are means; 1: they are this step's own."""
    is_last: bool
    step: Step
    """With ``steps`` 1 and without lists of single values."""


@dataclass(kw_only=True)
class RankExtent:
    """Reading of one rank's events in their order: the steps that they cover, by attempts, and the gaps in them."""

    rank: int
    steps: int = 0
    first: int | None = None
    """First step, of the first attempt."""
    last: int | None = None
    """Last step, of the last attempt."""
    attempts: int = 1
    beginnings: int = 0
    """How often the steps began at 1."""
    is_task: bool = False
    """Whether a training plan is recorded, as of a task."""
    host: str = ""
    """Host of the rank in the attempt of the last event; empty where it has recorded none."""
    missing: int = 0
    """Steps that are not in the record although later ones are."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """The first few gaps, each with its first and last missing step."""
    unreadable_lines: int = 0
    """Lines that are no events of this version, such as those that a crash has torn."""
    lost_events: int = 0
    """Events that could not be written, as on a full disk."""
    only_means: int = 0
    """Steps that the record has only in means over several steps."""
    is_cut: bool = False
    """Whether reading ended early, at a long part of the file without any event."""
    _has_joined: bool = False
    """Whether this attempt has reported that it joins the process group."""
    _next: int | None = None
    """Number of the next step, where that is known."""

    def note(self, event: AnyEvent) -> None:
        """Note an event other than a step: the begin of an attempt, its first step, or lost events."""
        if type(event) is RankState:
            self.host = event.host or self.host
            if event.state == "joining":
                if self._has_joined or self.steps:
                    self._begin_attempt()
                self._has_joined = True
        elif type(event) is TrainingPlan:
            self._next = event.first_update + 1
            self.is_task = True
        elif type(event) is Lost:
            self.lost_events += event.events

    def step(self, event: Step) -> Iterator[SingleStep]:
        count = event.steps
        if count > min(event.step, MAX_STEPS_PER_EVENT) or event.rank != self.rank:
            self.unreadable_lines += 1
            return
        first = event.step - count + 1
        if self._next is not None and first < self._next and self.steps:  # a script need not join
            self._begin_attempt()
        if self._next is not None and first > self._next:
            self.missing += first - self._next
            if len(self.gaps) < MAX_GAPS:
                self.gaps.append((self._next, first - 1))
        self._next = event.step + 1
        self.beginnings += begins_at_1(event)
        self.steps += count
        self.first = first if self.first is None else self.first
        self.last = event.step
        if count == 1:
            yield SingleStep(self.attempts, 1, True, event)
            return
        if event.step_ms_each is None or len(event.step_ms_each) != count:
            self.only_means += count
        for index, single in enumerate(single_steps(event, means=True)):
            yield SingleStep(self.attempts, count, index == count - 1, single)

    def _begin_attempt(self) -> None:
        self.attempts += 1
        self._has_joined = False
        self._next = None


class RecordedSteps:
    """The recorded steps of some ranks of a run, up to the sizes that their files have at construction."""

    def __init__(self, run: Run, ranks: Sequence[int]) -> None:
        """Note how long each file is."""
        self.run = run
        self.ranks = ranks
        self.extents = {rank: RankExtent(rank=rank) for rank in ranks}
        """Extent of each rank's record, as the last reading found it."""
        names = [*map(str, ranks), *(path.stem for path in run.dir.events.glob("*.ndjson") if path.stem.isdecimal())]
        self._sizes = {name: size_of(run.dir.events / f"{name}.ndjson") for name in names}

    @property
    def began(self) -> float:
        """Start of the run or of the earliest recorded event of the wanted ranks, Unix seconds."""
        paths = [path for path in map(self.run.dir.rank_events, self.ranks) if size_of(path)]
        heads = [decode_events(read_part(path, 0, READ_BYTES[0])) for path in paths]
        firsts = [events[0] for events in heads if events]
        times = [e.time - (e.step_ms or 0.0) * e.steps / 1e3 if type(e) is Step else e.time for e in firsts]
        return min([*times, self.run.status.started] if self.run.status.started else times, default=0.0)

    def of(self, rank: int, *, share: int = 1) -> Iterator[SingleStep]:
        """Yield the steps of a rank in the order of its record; ``share``: how many ranks are read side by side."""
        extent = self.extents[rank] = RankExtent(rank=rank)
        limit = max(READ_BYTES[0], min(READ_BYTES[1], SIDE_BY_SIDE_BYTES // share))
        without_event = 0
        for lines in self._lines(str(rank), limit, keep_open=share < (open_files() or share + 1) // 2):
            events = decode_events(lines)
            extent.unreadable_lines += sum(map(bool, lines.split(b"\n"))) - len(events)
            for event in events:
                if type(event) is Step:
                    yield from extent.step(event)
                else:
                    extent.note(event)
            without_event = 0 if events else without_event + len(lines)
            if without_event > MAX_BYTES_WITHOUT_EVENT:
                extent.is_cut = True
                return

    def metrics(self, rank: int) -> Iterator[tuple[int, Metrics]]:
        """Yield the user's own metrics of a rank in the order of its record, each with its attempt."""
        extent = RankExtent(rank=rank)
        for lines in self._lines(str(rank), READ_BYTES[1]):
            for event in decode_events(lines):
                if type(event) is Step:
                    deque(extent.step(event), maxlen=0)
                elif type(event) is Metrics:
                    yield extent.attempts, event
                else:
                    extent.note(event)

    def metric_names(self) -> list[str]:
        """Return the names of the user's own metrics of all wanted ranks."""
        names: dict[str, None] = {}
        for rank in self.ranks:
            for lines in self._lines(str(rank), READ_BYTES[1]):
                kept = [line for line in lines.splitlines(keepends=True) if line.startswith(b'{"type":"metrics"')]
                for event in decode_events(b"".join(kept)):
                    if type(event) is Metrics:
                        names |= dict.fromkeys([*event.values, *event.non_finite])
        return list(names)

    def over_ranks(self) -> Iterator[list[SingleStep]]:
        """Yield the steps of equal attempt and number of all wanted ranks together, in their order."""
        readings = [self.of(rank, share=len(self.ranks)) for rank in self.ranks]
        for _, row in groupby(heapq.merge(*readings, key=_attempt_and_step), _attempt_and_step):
            yield list(row)

    def notes(self, names: Sequence[str]) -> Iterator[AnyEvent]:
        """Yield the events of some files, by name without suffix, but no steps, metrics and samples of machines."""
        for name in names:
            for lines in self._lines(name, READ_BYTES[1]):
                kept = [line for line in lines.splitlines(keepends=True) if not line.startswith(FREQUENT_EVENTS)]
                yield from decode_events(b"".join(kept), self.run.status.recorded_ranks)

    def share_changes(self) -> list[tuple[int, ShareChange]]:
        """Return the changes of the ranks' shares, each with its attempt; empty where shares are not balanced."""
        extent, changes = RankExtent(rank=0), []
        for event in self.notes(["0"]):
            if type(event) is ShareChange:
                changes.append((extent.attempts, event))
            else:
                extent.note(event)
        return changes

    def names(self) -> list[str]:
        """Return the names of all event files, without suffix: that of the run, those of ranks, those of nodes."""
        return sorted((path.stem for path in self.run.dir.events.glob("*.ndjson")), key=by_rank)

    def _lines(self, name: str, limit: int, *, keep_open: bool = True) -> Iterator[bytes]:
        path = self.run.dir.events / f"{name}.ndjson"
        remaining = self._sizes[name] if name in self._sizes else size_of(path)
        file = AppendedFile(path, keep_open=keep_open)
        try:
            while remaining > 0:
                before = file.offset
                lines = file.lines(min(remaining, limit))
                read = file.offset - before
                if not read:  # the file was replaced by a shorter one
                    return
                remaining -= read
                if lines:
                    yield lines
            if self.run.state not in GOING and (torn := file.remainder()):
                yield torn
        except OSError:  # it was deleted, or the disk fails
            return
        finally:
            file.close()


FREQUENT_EVENTS = (b'{"type":"step"', b'{"type":"metrics"', b'{"type":"node_sample"')
"""Beginnings of the lines that make up most of a record."""


def _attempt_and_step(single: SingleStep) -> tuple[int, int]:
    return single.attempt, single.step.step
