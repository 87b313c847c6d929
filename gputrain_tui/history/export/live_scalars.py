"""Follows the record of a run and passes every single step of it to a sink once, also over restarts of the writer.

The streams of values follow from the record alone: a restarted writer reads the record from its beginning and skips as
many values of each stream as were written before.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from gputrain_tui.history.export.extent import RankExtent
from gputrain_tui.history.export.steps import RankReading, SingleStep
from gputrain_tui.history.follow import Follower
from trainer.contract.record import RunDir, RunEnded, RunStarted, Step, Validation, decode_events


class Sink(Protocol):
    """Receiver of the values of a run, which are pending until ``commit``."""

    def rank(self, rank: int, single: SingleStep, *, restarted: bool) -> None:
        """Take a step of one rank; ``restarted``: the rank has started again before it."""

    def over_ranks(self, row: list[SingleStep], *, restarted: bool) -> None:
        """Take a step of all ranks, in their order."""

    def validation(self, event: Validation) -> None:
        """Take an evaluation."""

    def commit(self, save: Callable[[], None]) -> None:
        """Write the pending values and call ``save``, which records progress, in the order that repeats no value."""

    def finish(self) -> None:
        """End the output: no more values follow."""


class LiveScalars:
    """The streams of a run: a stream of steps for each rank, one over all ranks, and one of evaluations."""

    def __init__(self, run_dir: RunDir, world_size: int, sink: Sink, *, written: Mapping[str, int]) -> None:
        """Begin at the beginning of the record.

        Args:
            run_dir: the run's directory.
            world_size: its number of ranks.
            sink: receiver of the values.
            written: by stream, the number of values written before.
        """
        self._follower = Follower(run_dir.events, ".ndjson")
        self._world_size = world_size
        self._sink = sink
        self._before = written
        self.written = Counter[str]()
        """By stream, the number of values so far, skipped ones included."""
        self.ended = False
        """Whether the record has the end of the run."""
        self._readings: dict[int, RankReading] = {}
        self._attempts: dict[str, int] = {}
        """By stream, the attempt of its last step."""
        self._rows: dict[tuple[int, int], dict[int, SingleStep]] = {}
        """Steps that only some ranks have recorded so far: by attempt and number, then by rank."""
        self._order: list[tuple[int, int]] = []
        """Heap of the keys of ``_rows``."""

    def poll(self) -> bool:
        """Forward the appended values; return whether any file has grown."""
        found = False
        # Bytes read between two commits; decoded events take about twenty times as much memory.
        budget_bytes = 1 << 20
        for name, lines in self._follower.poll(budget_bytes):
            found = True
            events = decode_events(lines, self._world_size)
            if name == "run":
                for event in events:
                    self.ended = isinstance(event, RunEnded) or (self.ended and not isinstance(event, RunStarted))
            elif name.isdecimal():
                rank = int(name)
                reading = self._readings.setdefault(rank, RankReading(RankExtent(rank=rank)))
                for event in events:
                    if isinstance(event, Step):
                        for single in reading.step(event):
                            self._step(rank, single)
                    elif isinstance(event, Validation) and rank == 0:
                        if self._is_new("validations"):
                            self._sink.validation(event)
                    else:
                        reading.note(event)
        return found

    def finish(self) -> None:
        """Forward the steps that some ranks never made; the record has ended."""
        while self._order:
            self._emit_first()

    def close(self) -> None:
        """Close the files."""
        self._follower.close()

    def _step(self, rank: int, single: SingleStep) -> None:
        stream = f"rank_{rank}"
        restarted = self._has_restarted(stream, single)
        if self._is_new(stream):
            self._sink.rank(rank, single, restarted=restarted)
        key = (single.attempt, single.step.step)
        if key not in self._rows:
            self._rows[key] = {}
            heapq.heappush(self._order, key)
        self._rows[key][rank] = single
        # Maximum number of steps that wait for some rank; beyond that the oldest is written without it, as for a
        # script whose ranks form no group.
        max_rows = 10_000
        if len(self._rows[key]) == self._world_size:
            while self._order and self._order[0] <= key:  # earlier steps are in it if a rank has skipped them
                self._emit_first()
        elif len(self._rows) > max_rows:
            self._emit_first()

    def _emit_first(self) -> None:
        row = self._rows.pop(heapq.heappop(self._order))
        steps = [row[rank] for rank in sorted(row)]
        restarted = self._has_restarted("over_ranks", steps[0])
        if self._is_new("over_ranks"):
            self._sink.over_ranks(steps, restarted=restarted)

    def _has_restarted(self, stream: str, single: SingleStep) -> bool:
        before = self._attempts.get(stream, single.attempt)
        self._attempts[stream] = single.attempt
        return single.attempt > before

    def _is_new(self, stream: str) -> bool:
        self.written[stream] += 1
        return self.written[stream] > self._before.get(stream, 0)
