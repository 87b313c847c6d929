"""Follows the record of a run and passes every single step of it to a sink, from the first one on."""

from __future__ import annotations

import heapq
from typing import Any, Protocol

from gputrain_tui.history.export.steps import RankExtent, SingleStep
from gputrain_tui.history.export.tensorboard_folder import (
    hyper_parameters,
    metric_scalars,
    over_ranks,
    validation_scalars,
)
from gputrain_tui.history.follow import Follower
from gputrain_tui.history.known_ranks import KnownRanks
from trainer.contract.record import Metrics, RunDir, RunEnded, RunStarted, Step, Validation, World


class Sink(Protocol):
    """Receiver of the values of a run, which are pending until ``commit``; after ``finish`` no more follow."""

    def rank(self, rank: int, single: SingleStep) -> None: ...

    def over_ranks(self, row: list[SingleStep]) -> None:
        """Take a step of all ranks, in their order."""

    def validation(self, event: Validation) -> None: ...

    def metrics(self, event: Metrics) -> None: ...

    def commit(self) -> None: ...

    def finish(self) -> None: ...


class WandbSink:
    """Logs mean, minimum and maximum over the ranks to Weights & Biases, with the user's ``wandb`` and its settings."""

    def __init__(self, run_dir: RunDir, world_size: int, project: str) -> None:
        """Begin or continue the run of the same id there."""
        import wandb

        self._pending: list[dict[str, float]] = []
        self._several = world_size > 1
        name = run_dir.path.name
        self._run: Any = wandb.init(
            project=project,
            id=name,
            name=name,
            dir=str(run_dir.path),
            config=hyper_parameters(run_dir, world_size),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # wandb's own step counts the calls of log and never goes back; the run's does after a restart.
        self._run.define_metric("*", step_metric="step")

    def rank(self, rank: int, single: SingleStep) -> None:
        """Skip single ranks: thousands of charts would hide the others."""

    def over_ranks(self, row: list[SingleStep]) -> None:
        means, lows, highs = over_ranks(row)
        values = {"step": float(row[0].step.step), **means}
        if self._several:
            values |= {f"lowest/{tag}": value for tag, value in lows.items()}
            values |= {f"highest/{tag}": value for tag, value in highs.items()}
        self._pending.append(values)

    def validation(self, event: Validation) -> None:
        self._pending.append({"step": float(event.step), **validation_scalars(event)})

    def metrics(self, event: Metrics) -> None:
        """Log the user's own metrics of rank 0; those of single other ranks are left out as above."""
        if event.rank == 0 and event.values:
            self._pending.append({"step": float(event.step), **metric_scalars(event)})

    def commit(self) -> None:
        for values in self._pending:
            self._run.log(values)
        self._pending.clear()

    def finish(self) -> None:
        """Finish the run there: wandb uploads the rest unless it is offline."""
        self._run.finish()


class LiveScalars:
    """The streams of a run: a stream of steps for each rank, one over all ranks, and one of evaluations."""

    def __init__(self, run_dir: RunDir, world_size: int, sink: Sink) -> None:
        self._known = KnownRanks(run_dir)
        self._follower = Follower(run_dir.events, ".ndjson", only=self._known)
        self._worlds = [(0, world_size)]
        """Numbers of ranks, each with the first attempt that has them, ascending."""
        self._sink = sink
        self.ended = False
        """Whether the record has the end of the run."""
        self._readings: dict[int, RankExtent] = {}
        self._rows: dict[tuple[int, int], dict[int, SingleStep]] = {}
        """Steps that only some ranks have recorded so far: by attempt and number, then by rank."""
        self._order: list[tuple[int, int]] = []
        self._complete = (0, 0)
        """The newest of these that all ranks of its attempt have recorded."""

    def poll(self) -> bool:
        """Forward the appended values; return whether any file has grown."""
        has_grown = False
        # Bytes read between two commits; decoded events take about twenty times as much memory.
        budget_bytes = 1 << 20
        for name, lines in self._follower.poll(budget_bytes):
            has_grown = True
            events = self._known.decode(lines)
            self._worlds += [(event.attempt, event.world_size) for event in events if isinstance(event, World)]
            if name == "run":
                for event in events:
                    self.ended = isinstance(event, RunEnded) or (self.ended and not isinstance(event, RunStarted))
                    if isinstance(event, RunStarted):
                        self._worlds[0] = (0, event.world_size)
            elif name.isdecimal():
                rank = int(name)
                reading = self._readings.setdefault(rank, RankExtent(rank=rank))
                for event in events:
                    if isinstance(event, Step):
                        for single in reading.step(event):
                            self._step(rank, single)
                    elif isinstance(event, Validation) and rank == 0:
                        self._sink.validation(event)
                    elif isinstance(event, Metrics):
                        self._sink.metrics(event)
                    else:
                        reading.note(event)
        if not self._follower.backlog_bytes:
            self._emit_through(self._complete)
        return has_grown

    def finish(self) -> None:
        """Forward the steps that some ranks never made; the record has ended."""
        while self._order:
            self._emit_first()

    def close(self) -> None:
        self._follower.close()

    def _step(self, rank: int, single: SingleStep) -> None:
        self._sink.rank(rank, single)
        key = (single.attempt, single.step.step)
        if key not in self._rows:
            self._rows[key] = {}
            heapq.heappush(self._order, key)
        self._rows[key][rank] = single
        # Maximum number of steps that wait for some rank; beyond that the oldest is written without it, as for a
        # script whose ranks form no group.
        max_rows = 10_000
        world_size = [size for first, size in self._worlds if first <= single.attempt][-1]
        if len(self._rows[key]) == world_size:
            self._complete = max(self._complete, key)
            if self._order[0][0] == single.attempt:  # else a rank that is gone may have steps of an earlier attempt
                self._emit_through(key)
        elif len(self._rows) > max_rows:
            self._emit_first()

    def _emit_through(self, key: tuple[int, int]) -> None:
        """Forward the steps up to a complete one, also those that a rank has skipped."""
        while self._order and self._order[0] <= key:
            self._emit_first()

    def _emit_first(self) -> None:
        row = self._rows.pop(heapq.heappop(self._order))
        self._sink.over_ranks([row[rank] for rank in sorted(row)])
