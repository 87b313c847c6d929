"""Shares of a global batch for a script that asks for them, by the compute per sample that its ranks measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from trainer.contract.balanced_shares import MIN_GAIN, WINDOW, ComputeTime, equal_shares, shares, slowest_ms
from trainer.contract.record import EventWriter, ShareChange
from trainer.engine.rank_compute import RankCompute
from trainer.telemetry.step_tracker import StepTracker


class ScriptShares:
    """The shares of a script's ranks; as it decides when they are judged, each call needs measurements of its own."""

    def __init__(self, tracker: StepTracker, writer: EventWriter) -> None:
        self._tracker, self._writer = tracker, writer
        self._together = dist.is_available() and dist.is_initialized()
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if self._together else (0, 1)
        self._shares: tuple[int, ...] = ()
        self._change: ShareChange | None = None
        """The last change, until it was measured."""
        self._compute = RankCompute()
        self._per_sample_ms: list[float] = []
        """Compute per sample in each step since the shares were judged last."""
        tracker.meter.keep_steps()

    def next(self, global_batch_size: int) -> tuple[int, ...]:
        """Return the shares of all ranks; a collective.

        Raises:
            ValueError: there are fewer samples than ranks, or the ranks give different numbers; on all of them.
        """
        # [ranks, 2]: milliseconds per sample, and the global batch
        told = torch.zeros(self._ranks, 2, dtype=torch.float64, device=self._tracker.device)
        told[self._rank, 0], told[self._rank, 1] = self._measured_ms(), global_batch_size
        if self._together:
            dist.all_reduce(told)
        measured, totals = told.T.tolist()
        if len(set(totals)) > 1:
            given = ", ".join(f"{total:.0f}" for total in totals[:8]) + (", …" if len(totals) > 8 else "")
            raise ValueError(f"the ranks give different global batches to shares(): {given} samples")
        if global_batch_size < self._ranks:
            raise ValueError(f"a global batch of {global_batch_size} samples is too small for {self._ranks} ranks")
        if sum(self._shares) != global_batch_size:
            self._take(equal_shares(global_batch_size, self._ranks), "start")
        times = [ComputeTime(0.0, ms) for ms in measured]
        if all(each.per_sample_ms > 0.0 for each in times):
            self._per_sample_ms.clear()
            self._judge(times, global_batch_size)
        return self._shares

    def _measured_ms(self) -> float:
        """Return this rank's median compute per sample, ms; 0 while too few steps were measured."""
        steps = self._tracker.meter.take_steps()
        self._per_sample_ms += [
            ms / step.samples
            for step, ms in zip(steps, self._compute.of(steps), strict=True)
            if step.samples and ms is not None
        ]
        return median(self._per_sample_ms) if len(self._per_sample_ms) >= WINDOW else 0.0

    def _judge(self, times: Sequence[ComputeTime], global_batch_size: int) -> None:
        """Report what the last change has brought, and take better shares if they are worth it."""
        now_ms = slowest_ms(times, self._shares)
        if self._change is not None:
            self._write(msgspec.structs.replace(self._change, time=time.time(), measured_ms=now_ms))
            self._change = None
        better = shares(times, [0] * self._ranks, global_batch_size)
        if slowest_ms(times, better) * (1 + MIN_GAIN) <= now_ms:
            self._take(better, "measured", times)

    def _take(
        self, new: tuple[int, ...], cause: Literal["start", "measured"], times: Sequence[ComputeTime] = ()
    ) -> None:
        previous, self._shares = self._shares, new
        step = self._tracker.step + 1
        change = ShareChange(time=time.time(), step=step, previous=list(previous), shares=list(new), cause=cause)
        if times:
            change.fixed_ms, change.per_sample_ms = ([getattr(t, name) for t in times] for name in ComputeTime._fields)
            change.slowest_ms, change.expected_ms = slowest_ms(times, previous), slowest_ms(times, new)
            self._change = change
        self._write(change)

    def _write(self, change: ShareChange) -> None:
        if self._rank == 0:
            self._writer.write(change)
