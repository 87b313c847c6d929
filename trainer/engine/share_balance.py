"""Balanced shares of the global batch: measured on each rank, agreed by all, changed at the same step everywhere.

Each rank measures its compute in a step, see ``rank_compute``. The times travel with the agreement on stopping and
saving, so that every rank decides alike, from the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import repeat, zip_longest
from statistics import median
from typing import Any

import msgspec

from trainer import distributed
from trainer.contract.balanced_shares import WINDOW, ComputeTime, RankFit, ShareChoice, attainable, shares, slowest_ms
from trainer.contract.errors import RequestError
from trainer.contract.learned_speeds import LearnedSpeeds
from trainer.contract.options import Training
from trainer.contract.record import ShareChange, Step
from trainer.contract.recorded_shares import recorded_shares
from trainer.contract.schema import describe
from trainer.data.batches import EpochBatches, Update
from trainer.data.loader import MicroBatch
from trainer.engine.accelerator import device_model
from trainer.engine.out_of_memory import divides, in_parts
from trainer.engine.rank_compute import RankCompute
from trainer.engine.resuming import SavedShares
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task
from trainer.telemetry.step_meter import StepMeter

_NUMBERS = 4
"""Numbers of a rank in an agreement: measurements with these shares, fixed and per-sample time, memory bound."""
_PER_MS = 1e9
"""Times travel as whole picoseconds."""


def measures_steps(options: Training, world_size: int) -> bool:
    """Return whether the shares are balanced by the times of the steps."""
    return options.batch_size == "balanced" and world_size > 1 and options.shares_from is None


class ShareBalance:
    """One rank's side of the balanced shares; without ``batch_size = "balanced"`` it does nothing."""

    def __init__(self, options: Training, ctx: WorkerContext, task: Task, train: Any, *, meter: StepMeter) -> None:
        self.enabled = options.batch_size == "balanced" and ctx.world_size > 1
        self._measures = measures_steps(options, ctx.world_size)
        self.most_updates = WINDOW if self._measures else 1 << 30
        """Most updates between two agreements."""
        self._ctx, self._meter = ctx, meter
        self._total = options.global_batch_size
        if not self.enabled:
            return
        assert isinstance(train, EpochBatches), "a stream is refused"
        self._train = train
        self._fit = RankFit()
        self._compute = RankCompute()
        self._recorded = None if options.shares_from is None else self._read(options.shares_from)
        """Shares by their first step, to be repeated; None measures."""
        self._longest = train.longest
        """Tokens of the longest sample, if shares are tokens; else 0."""
        self._unit = "tokens" if self._longest else "samples"
        self._choice = ShareChoice(self._total, least=self._least)
        # A rank's part of a batch exceeds its share by one sample at most.
        self._limit = max(options.max_tokens - self._longest, 0)
        self._bounds = [0] * ctx.world_size
        """Agreed bounds by memory; 0: none."""
        self._own_bound = 0
        self._samples = 0
        """Samples of the micro-batch in progress."""
        self._times: list[ComputeTime] = []
        """The last agreed measurement; empty before the first."""
        self._cause: Any = "start"
        self._learned = LearnedSpeeds(options, describe(task.Options), msgspec.to_builtins(task.options))
        self._models: list[str] = []
        """Models of the ranks' devices, where speeds are measured."""
        self._change: ShareChange | None = None
        """The last change, until it was measured."""
        self._begin(1)

    def _begin(self, step: int) -> None:
        """Measure anew from a step on, which is the first with these shares."""
        self._first_step = step
        self._values: list[float] = []
        self._made: dict[int, int] = {}
        """Micro-steps of each step that was made with whole shares and not yet measured."""
        self._windows = self._agreed_windows = 0
        self._choice.begin()

    def start(self, *, step: int) -> None:
        """Record the first shares, before a step."""
        if self.enabled:
            if self._recorded is not None:
                self._train.set_batch_sizes(self._recorded.get(step, self._shares))
            else:
                self._begin_with_learned()
            self._own_bound = self._bounds[self._ctx.rank]
            self._begin(step)
            self._write(ShareChange(time=time.time(), step=step, previous=[], shares=self._shares, cause=self._cause))

    def _begin_with_learned(self) -> None:
        """Take the shares that fit the speeds of the ranks' devices in earlier runs, which rank 0 knows."""
        before, self._models = self._models, distributed.all_gather_list(device_model(self._ctx.device))
        if before and before != self._models:  # another device may hold more
            same = [one == other for one, other in zip_longest(before, self._models)]
            self._bounds = [bound if as_before else 0 for bound, as_before in zip(self._bounds, same, strict=False)]
        learned = distributed.from_master(lambda: self._learned.shares(self._models, self._total, least=self._least))
        if self._cause == "start" and learned is not None and max(learned) <= (self._limit or self._total):
            self._train.set_batch_sizes(learned)
            self._cause = "learned"
            self._ctx.print_line(
                f"the ranks' shares are {_listed(learned)} {self._unit} at the start, by earlier runs on such devices"
            )

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
            whole = bool(self._longest) or update.global_samples == self._total * update.micro_steps
            if whole and index == 1 and self._measures:
                self._made[step] = update.micro_steps
            self._samples = micro.samples
            most = micro.samples * self._own_bound // share if self._longest else self._own_bound
            if self._own_bound and (most := max(most, 1)) < micro.samples and divides(micro):
                parts = in_parts(micro, most)
                for part in parts:
                    yield part, last and part is parts[-1]
            else:
                yield micro, last

    def ran_out(self, most: int, *, step: int) -> None:
        """Note that a part of a micro-batch may have so many samples, since this rank's memory ran out in a step."""
        share = self._shares[self._ctx.rank]
        self._own_bound = max(share * most // self._samples, 1) if self._longest else most
        self._made.pop(step, None)

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
        for step, ms in zip(steps, self._compute.of(steps), strict=True):
            micro_steps = self._made.pop(step.step, 0)  # none where the epoch's end has fewer samples
            if step.step < self._first_step or not micro_steps:
                continue
            if ms is not None:
                self._values.append(ms / micro_steps)
        # Between two agreements: shares change after the first step, and a device may not have done the last one.
        if len(self._values) >= WINDOW - 2:
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
        next_ones = self._choice.add(self._times, current, self._bounds)
        if next_ones is not None:
            self._change_to(next_ones, cause="measured", step=step)

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
            if self._ctx.rank == 0:
                self._learned.learn(self._models, self._times)

    def _read(self, folder: str) -> dict[int, list[int]]:
        """Return a run's recorded shares by step; every rank gets those that rank 0 reads."""

        def read() -> dict[int, list[int]]:
            try:
                return recorded_shares(folder, ranks=self._ctx.world_size, global_batch_size=self._total)
            except RequestError as refused:
                raise RequestError(f"--shares-from: {refused}") from None

        return distributed.from_master(read)  # type: ignore[no-any-return]

    def _write(self, change: ShareChange) -> None:
        if self._ctx.rank == 0:
            self._ctx.writer.write(change)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the shares of all ranks, their bounds by memory and their devices; empty if they are not balanced."""
        if not self.enabled:
            return {}
        return {"shares": self._shares, "bounds": list(self._bounds), "models": list(self._models)}

    def load_state_dict(self, saved: SavedShares) -> None:
        """Continue with the shares of a checkpoint, if it has as many ranks and the same global batch."""
        ranks = self._ctx.world_size
        if not self.enabled or len(saved.shares) != ranks or sum(saved.shares) != self._total:
            return
        self._train.set_batch_sizes(saved.shares)
        self._bounds = saved.bounds if len(saved.bounds) == ranks else [0] * ranks
        self._models = saved.models
        self._cause = "resumed"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
