"""Balanced shares of the global batch: measured on each rank, agreed by all, changed at the same step everywhere.

Each rank measures its compute in a step: the step's time without its wait for the gradients of others. It is wall time,
and not CPU time: a rank that waits for its data, for a core or for its quota is slow for all, whatever it waits for.
The times travel with the agreement on stopping and saving, so that every rank decides alike, from the same numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, repeat
from statistics import median
from typing import Any

from trainer import distributed
from trainer.contract.balanced_shares import ComputeTime, attainable, shares, slowest_ms
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.contract.record import RunDir, ShareChange, Step, decode_events
from trainer.contract.record.regular_file import open_regular
from trainer.data.batches import EpochBatches, Update
from trainer.data.loader import MicroBatch
from trainer.engine import reports
from trainer.engine.out_of_memory import BatchTrial, divides, in_parts
from trainer.engine.resuming import SavedShares
from trainer.engine.worker_context import WorkerContext
from trainer.telemetry.step_meter import StepMeter

WINDOW = 8
"""Steps whose median is one measurement: fewer are moved by a single stall, more answer late."""
MIN_GAIN = 0.05
"""Least relative gain in the compute of the slowest rank for which the shares change."""

_NUMBERS = 4
"""Numbers of a rank in an agreement: measurements with these shares, fixed and per-sample time, memory bound."""
_PER_MS = 1e9
"""Times travel as whole picoseconds."""


class RankFit:
    """Fit of one rank's compute time, from one measurement for each of its recent shares."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}
        """Milliseconds of a micro-step by share, the newest last."""

    def add(self, share: int, ms: float) -> None:
        """Add a measurement. Another time at the same share is a change of speed, which holds at every share."""
        if share in self._measured:
            factor = ms / self._measured[share]
            self._measured = {each: at * factor for each, at in self._measured.items()}
        self._measured.pop(share, None)
        self._measured[share] = ms
        if len(self._measured) > WINDOW:
            del self._measured[next(iter(self._measured))]

    def time(self) -> ComputeTime:
        """Return the line through the newest measurement with the median slope of all pairs (Theil and Sen).

        Shares within an eighth of each other show no slope. The fixed part is taken as none until there is a pair, and
        as half of the time at most: a slope that is too flat would give the rank far too large a share.
        """
        share, ms = next(reversed(self._measured.items()))
        slopes = [
            (self._measured[high] - self._measured[low]) / (high - low)
            for low, high in combinations(sorted(self._measured), 2)
            if 8 * (high - low) >= high
        ]
        steepest = ms / share
        slope = min(max(median(slopes), steepest / 2), steepest) if slopes else steepest
        return ComputeTime(ms - slope * share, slope)


def next_shares(
    current: Sequence[int],
    before: Sequence[ComputeTime],
    now: Sequence[ComputeTime],
    bounds: Sequence[int],
    global_batch_size: int,
    least: int = 1,
) -> tuple[int, ...] | None:
    """Return better shares by two measurements that follow each other; None if the current ones stay.

    The shares that the first one suggests must bring ``MIN_GAIN`` by the second one too: what passes, and noise, which
    differs between the two, moves nothing.
    """
    suggested = shares(before, bounds, global_batch_size, least=least)
    if slowest_ms(now, suggested) * (1 + MIN_GAIN) > slowest_ms(now, current):
        return None
    better = shares(now, bounds, global_batch_size, least=least)
    return None if better == tuple(current) else better


def measures_steps(options: Training, world_size: int) -> bool:
    """Return whether the shares are balanced by the times of the steps."""
    return options.batch_size == "balanced" and world_size > 1 and options.shares_from is None


class ShareBalance:
    """One rank's side of the balanced shares; without ``batch_size = "balanced"`` it does nothing."""

    def __init__(
        self, options: Training, ctx: WorkerContext, train: Any, *, meter: StepMeter, trial: BatchTrial
    ) -> None:
        self.enabled = options.batch_size == "balanced" and ctx.world_size > 1
        self._measures = measures_steps(options, ctx.world_size)
        self.most_updates = WINDOW if self._measures else 1 << 30
        """Most updates between two agreements."""
        self._ctx, self._meter, self._trial = ctx, meter, trial
        self._total = options.global_batch_size
        if not self.enabled:
            return
        assert isinstance(train, EpochBatches), "a stream is refused"
        self._train = train
        self._fit = RankFit()
        self._recorded = None if options.shares_from is None else self._read(options.shares_from)
        """Shares by their first step, to be repeated; None measures."""
        self._longest = train.longest
        """Tokens of the longest sample, if shares are tokens; else 0."""
        self._unit = "tokens" if self._longest else "samples"
        # A rank's part of a batch exceeds its share by one sample at most.
        self._limit = max(options.max_tokens - self._longest, 0)
        self._bounds = [0] * ctx.world_size
        """Agreed bounds by memory; 0: none."""
        self._own_bound = 0
        self._times: list[ComputeTime] = []
        """The last agreed measurement; empty before the first."""
        self._cause: Any = "start"
        self._change: ShareChange | None = None
        """The last change, until it was measured."""
        self._told_slow = False
        # With a static graph, DDP learns the graph from the first backward pass, which must be one of a step.
        self._tries = not options.static_graph
        self._untried = 2
        """Updates before which a batch is tried: the first one, and the next, when the optimizer has its state."""
        self._begin(1)

    def _begin(self, step: int) -> None:
        """Measure anew from a step on, which is the first with these shares."""
        self._first_step = step
        self._values: list[float] = []
        self._made: dict[int, int] = {}
        """Micro-steps of each step that was made with whole shares and not yet measured."""
        self._windows = self._agreed_windows = 0
        self._before: list[ComputeTime] = []

    def start(self, *, step: int) -> None:
        """Record the first shares, before a step."""
        if self.enabled:
            if self._recorded is not None:
                self._train.set_batch_sizes(self._recorded.get(step, self._shares))
            self._begin(step)
            self._write(ShareChange(time=time.time(), step=step, previous=[], shares=self._shares, cause=self._cause))

    @property
    def _least(self) -> int:
        return self._longest or 1

    @property
    def _shares(self) -> list[int]:
        return list(self._train.batch_sizes)

    def micro_batches(self, update: Update, *, step: int) -> Iterator[tuple[MicroBatch, bool]]:
        """Return the micro-batches of a step, each with whether it is the last; in parts if memory demands it.

        The parts add up to the same gradient, so that no other rank needs to know.
        """
        if self.enabled:
            return self._balanced(update, step)
        return zip(update, [*repeat(False, update.micro_steps - 1), True], strict=True)

    def _balanced(self, update: Update, step: int) -> Iterator[tuple[MicroBatch, bool]]:
        for index, micro in enumerate(update, start=1):
            last = index == update.micro_steps
            share = self._train.batch_sizes[self._ctx.rank]
            # All ranks try at the same updates, for the sake of collectives in a model's forward pass.
            whole = bool(self._longest) or update.global_samples == self._total * update.micro_steps
            if whole and index == 1 and self._measures:
                self._made[step] = update.micro_steps
            if self._untried and self._tries and whole and index == 1:
                self._untried -= 1
                if (most := self._trial.most_samples(micro)) < micro.samples:
                    self._own_bound = max(share * most // micro.samples, 1) if self._longest else most
            most = micro.samples * self._own_bound // share if self._longest else self._own_bound
            if self._own_bound and (most := max(most, 1)) < micro.samples and divides(micro):
                parts = in_parts(micro, most)
                for part in parts:
                    yield part, last and part is parts[-1]
            else:
                yield micro, last

    def numbers(self) -> list[int]:
        """Return what this rank tells the others; each number is 0 in the place of every other rank."""
        if not self._measures:
            return []
        self._measure(self._meter.take_steps())
        found = [0] * (_NUMBERS * self._ctx.world_size)
        fit = self._fit.time() if self._windows else ComputeTime(0.0, 0.0)
        own = [self._windows, round(fit.fixed_ms * _PER_MS), round(fit.per_sample_ms * _PER_MS), self._own_bound]
        found[_NUMBERS * self._ctx.rank : _NUMBERS * (self._ctx.rank + 1)] = own
        return found

    def _measure(self, steps: Sequence[Step]) -> None:
        share = self._shares[self._ctx.rank]
        for step in steps:
            micro_steps = self._made.pop(step.step, 0)  # none where the epoch's end has fewer samples
            if step.step < self._first_step or not micro_steps:
                continue
            if step.step_ms is None or step.sync_exposed_ms is None:
                continue
            self._values.append(max(step.step_ms - step.sync_exposed_ms, 1e-6) / micro_steps)
            if len(self._values) == WINDOW:
                self._fit.add(share, median(self._values))
                self._values.clear()
                self._windows += 1

    def agree(self, numbers: Sequence[int], *, step: int) -> None:
        """Change the shares from ``step`` on, if the numbers of all ranks say so; every rank has the same ones."""
        if self.enabled and self._recorded is not None:
            recorded = self._recorded.get(step, self._shares)
            if recorded != self._shares:
                self._change_to(recorded, cause="recorded", step=step)
        if not numbers:
            return
        rows = [numbers[at : at + _NUMBERS] for at in range(0, len(numbers), _NUMBERS)]
        windows = min(row[0] for row in rows)
        self._bounds = [min(row[3] or self._limit, self._limit or row[3]) for row in rows]
        measured = windows > self._agreed_windows
        if measured:
            self._agreed_windows = windows
            self._times = [ComputeTime(row[1] / _PER_MS, max(row[2], 1) / _PER_MS) for row in rows]
            self._report_measured()
        current = self._shares
        most = attainable(self._bounds, self._total, least=self._least)
        if any(share > bound for share, bound in zip(current, most, strict=True)):
            times = self._times or [ComputeTime(0.0, 1.0)] * len(current)
            self._change_to(shares(times, self._bounds, self._total, least=self._least), cause="memory", step=step)
            return
        if not measured:
            return
        before, self._before = self._before, self._times
        if not before:
            return
        next_ones = next_shares(current, before, self._times, self._bounds, self._total, self._least)
        if next_ones is not None:
            self._change_to(next_ones, cause="measured", step=step)
        elif not self._longest:
            self._tell_slow()

    def _change_to(self, new: Sequence[int], *, cause: Any, step: int) -> None:
        previous = self._shares
        change = ShareChange(time=time.time(), step=step, previous=previous, shares=list(new), cause=cause)
        if self._times:
            change.fixed_ms = [round(each.fixed_ms, 4) for each in self._times]
            change.per_sample_ms = [float(f"{each.per_sample_ms:.5g}") for each in self._times]
            change.slowest_ms = round(slowest_ms(self._times, previous), 4)
            change.expected_ms = round(slowest_ms(self._times, new), 4)
        if any(self._bounds):
            change.bounds = list(self._bounds)
        self._train.set_batch_sizes(new)
        self._untried = max(self._untried, 1)
        self._begin(step)
        self._change = change
        self._write(change)
        text = f"from step {step} on the ranks' shares are {_listed(new)} {self._unit}, not {_listed(previous)}"
        if cause == "memory":
            out = [rank for rank, share in enumerate(previous) if 0 < self._bounds[rank] < share]
            text += f", for rank {_listed(out)} ran out of memory"
        elif change.expected_ms is not None:
            text += f": the slowest rank then computes {change.expected_ms:.3g} instead of {change.slowest_ms:.3g} ms"
        self._ctx.print_line(text)

    def _report_measured(self) -> None:
        if self._change is not None:
            self._change.measured_ms = round(slowest_ms(self._times, self._shares), 4)
            self._change.time = time.time()
            self._write(self._change)
            self._change = None

    def _tell_slow(self) -> None:
        """Report, once, a rank that is the slowest one even with one sample."""
        current = self._shares
        each = [fit.of(share) for fit, share in zip(self._times, current, strict=True)]
        slowest = each.index(max(each))
        others = max(ms for rank, ms in enumerate(each) if rank != slowest)
        if self._told_slow or current[slowest] > 1 or each[slowest] < (1 + MIN_GAIN) * others:
            return
        self._told_slow = True
        reports.finding(
            self._ctx,
            "slow_with_one_sample",
            f"rank {slowest} takes {each[slowest]:.3g} ms for one sample, and the others {others:.3g} ms for their "
            "shares: no share of it is small enough to be as fast",
            severity="warning",
            advice=f"raise --global-batch-size, or train without rank {slowest}",
        )

    def _read(self, folder: str) -> dict[int, list[int]]:
        """Return the changes of shares in a run's record by step; every rank gets those that rank 0 reads."""

        def read() -> dict[int, list[int]]:
            path = RunDir(folder).rank_events(0)
            try:
                # By lines: most are steps, perhaps a great many.
                with os.fdopen(open_regular(path), "rb") as file:
                    events = decode_events(b"".join(line for line in file if b'"type":"shares"' in line))
            except OSError as error:
                raise RequestError(f"--shares-from {folder}: {path} cannot be read: {error.strerror}") from None
            changes = [event for event in events if isinstance(event, ShareChange)]
            if not changes:
                raise RequestError(f"--shares-from {folder}: this run has no balanced shares in its record")
            found: dict[int, list[int]] = {}
            for change in changes:
                if len(change.shares) != self._ctx.world_size or sum(change.shares) != self._total:
                    raise RequestError(
                        f"--shares-from {folder}: its shares are {_listed(change.shares)} samples of "
                        f"{len(change.shares)} ranks, but this run divides {self._total} among {self._ctx.world_size}"
                    )
                if change.cause in ("start", "resumed"):  # steps after it were made again
                    found = {step: each for step, each in found.items() if step < change.step}
                found[change.step] = change.shares
            return found

        return distributed.from_master(read)  # type: ignore[no-any-return]

    def _write(self, change: ShareChange) -> None:
        if self._ctx.rank == 0:
            self._ctx.writer.write(change)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the shares of all ranks and their bounds by memory; empty if they are not balanced."""
        return {"shares": self._shares, "bounds": list(self._bounds)} if self.enabled else {}

    def load_state_dict(self, saved: SavedShares) -> None:
        """Continue with the shares of a checkpoint, if it has as many ranks and the same global batch."""
        ranks = self._ctx.world_size
        if not self.enabled or len(saved.shares) != ranks or sum(saved.shares) != self._total:
            return
        self._train.set_batch_sizes(saved.shares)
        self._bounds = saved.bounds if len(saved.bounds) == ranks else [0] * ranks
        self._own_bound = self._bounds[self._ctx.rank]
        self._cause = "resumed"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
