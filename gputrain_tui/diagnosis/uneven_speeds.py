"""Detects ranks that are slower than others by nature: their compute per sample is longer from the first step on.

With equal shares of a batch every step then takes as long as the slowest rank; shares in proportion to speed take less.
A rank that becomes slow later, in one phase alone or for a known fault is a straggler, and so is a GPU that is slower
than others of its model. Ranks of known speeds are compared at one speed for stragglers: one fault has one finding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.causes import cause_of
from gputrain_tui.diagnosis.row import PHASES, StepPhases, StepRow
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.diagnosis.thresholds import SPEED_BLOCKS, WINDOW_ROWS
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RankView, RunState
from gputrain_tui.tables import ranks_text
from trainer.contract import balanced_shares
from trainer.contract.balanced_shares import ComputeTime


class _Speeds(NamedTuple):
    """Compute of each rank over some rows."""

    samples: Sequence[float]
    """Samples of each rank in a step."""
    forward: Sequence[float]
    """Median forward pass per sample, ms."""
    backward: Sequence[float]
    compute: Sequence[float]
    """Median forward and backward pass together, per sample, ms."""
    step_ms: float

    def gain_ms(self, shares: Sequence[float]) -> float:
        """Return by how much these shares of the samples would shorten a step, ms."""
        return self._compute_ms(self.samples) - self._compute_ms(shares)

    def _compute_ms(self, shares: Sequence[float]) -> float:
        return max(share * each for share, each in zip(shares, self.compute, strict=True))

    def balanced(self) -> Sequence[int]:
        """Return the shares of all samples with which a step takes least, if computing takes time by sample."""
        times = [ComputeTime(0.0, each) for each in self.compute]
        return balanced_shares.shares(times, [0] * len(times), max(round(sum(self.samples)), len(times)))


class UnevenSpeeds:
    """Detects ranks of different speeds, block by block from the first step on."""

    def __init__(self) -> None:
        self._start(())

    def _start(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._rows: list[StepRow] = []
        """Rows of the block that is not complete."""
        self._blocks: deque[_Speeds] = deque(maxlen=SPEED_BLOCKS)
        self._known = False
        """Whether the speeds have been found to differ by nature."""
        self._over = False
        """Whether they have not, or no longer: what slows a rank from then on is something else."""
        self._symptom: Symptom | None = None
        self.slowness: Sequence[float] = ()
        """By index of a rank, how many times as long as the fastest it computes for a sample; empty where they do not
        differ by nature."""

    def symptoms(
        self, state: RunState, timeline: Timeline, added: Sequence[StepRow], *, excluded: Set[int] = frozenset()
    ) -> list[Symptom]:
        """Return the symptom of uneven speeds; ``added``: the rows since the last call, in order.

        ``excluded``: ranks that are known to be slow for another reason.
        """
        if self._ranks != tuple(timeline.ranks) or not timeline.rows:
            self._start(timeline.ranks)
        if state.shares.newest is not None:  # they are balanced
            return []
        for row in added:
            if self._over or len(row.phases) < 2 or not row.synced or not all(each.samples for each in row.phases):
                continue
            self._rows.append(row)
            if len(self._rows) == WINDOW_ROWS:
                self._add_block(state, excluded)
                self._rows = []
        return [self._symptom] if self._symptom is not None else []

    def _add_block(self, state: RunState, excluded: Set[int]) -> None:
        """Judge the speeds anew with the block that is complete."""
        rows = self._rows
        views = [state.ranks[rank] for rank in self._ranks]
        self._blocks.append(_speeds(rows, [_model(view) for view in views]))
        decided = len(self._blocks) == SPEED_BLOCKS
        speeds = _overall(self._blocks)
        shares = speeds.balanced()
        gain_ms = speeds.gain_ms(shares)
        slow = [index for index, share in enumerate(shares) if share < speeds.samples[index]]
        agreeing = sum(block.gain_ms(shares) >= gain_ms / 2 for block in self._blocks)
        least = limit.SPEED_GAIN_SHARE * (limit.CLEAR_SHARE if self._known else 1.0)
        differ = (
            gain_ms >= least * speeds.step_ms > 0.0
            and agreeing >= limit.MIN_AGREEING_SHARE * len(self._blocks)
            and (self._known or self._by_nature(state, speeds, slow, excluded))
        )
        self._known, self._over = decided and differ, decided and not differ
        self._symptom = _symptom(state, self._ranks, speeds, step=rows[-1].step) if self._known else None
        self.slowness = [each / min(speeds.compute) for each in speeds.compute] if differ else ()

    def _by_nature(self, state: RunState, speeds: _Speeds, slow: Sequence[int], excluded: Set[int]) -> bool:
        """Whether ranks are slower as a slower device is, and for no fault that can be put right."""
        ranks = self._ranks
        return (
            all(_is_in_proportion(speeds, index) for index in slow)
            and not any(_holds_a_part(state.ranks[rank], len(ranks)) for rank in ranks)
            # A straggler that was found while the ranks were compared at one speed is late besides.
            and not (not self.slowness and any(ranks[index] in excluded for index in slow))
            and not any(self._has_fault(state, index) for index in slow)
        )

    def _has_fault(self, state: RunState, index: int) -> bool:
        """Whether a rank is slow for a reason that the record shows and that can be put right."""
        rank, rows = self._ranks[index], self._rows
        late_ms = median([row.own_excess[index] for row in rows])
        phases = {phase: median([row.excess(phase, index) for row in rows]) for phase in (*PHASES, "gc")}
        cause = cause_of(state, rank, late_ms, phases, rows, self._ranks).name if late_ms > 0.0 else ""
        if cause == "gpu_clock":  # of another model, whose clock is another
            return _model(state.ranks[rank]) is None
        return cause in ("garbage_collection", "cpu_steal", "cpu_quota", "gpu_thermal")


def _model(view: RankView) -> str | None:
    """Return the model of a rank's GPU; None for a CPU, and where it is not known."""
    return view.flops.device_name if view.flops is not None else None


def _holds_a_part(view: RankView, world_size: int) -> bool:
    """Whether a rank computes a part of a model only: then its samples are also those of other ranks."""
    return any(1 < len(group.ranks) < world_size for group in view.groups.by_name.values())


def _speeds(rows: Sequence[StepRow], models: Sequence[str | None]) -> _Speeds:
    """Return the speeds over some rows; GPUs of one model have the same, the median of theirs."""
    samples = list(zip(*([each.samples or 1.0 for each in row.phases] for row in rows), strict=True))

    def per_sample(time: Callable[[StepPhases], float]) -> list[float]:
        times = zip(*([time(each) for each in row.phases] for row in rows), strict=True)
        own = [median([ms / size for ms, size in zip(*rank, strict=True)]) for rank in zip(times, samples, strict=True)]
        of_model: dict[str | None, list[float]] = {}
        for model, each in zip(models, own, strict=True):
            of_model.setdefault(model, []).append(each)
        return [each if model is None else median(of_model[model]) for model, each in zip(models, own, strict=True)]

    return _Speeds(
        samples=[fmean(each) for each in samples],
        forward=per_sample(attrgetter("forward")),
        backward=per_sample(attrgetter("backward")),
        compute=per_sample(lambda phases: max(phases.forward + phases.backward, 1e-6)),
        step_ms=median([row.step_ms for row in rows]),
    )


def _overall(blocks: Sequence[_Speeds]) -> _Speeds:
    """Return the medians over some blocks."""

    def medians(name: str) -> list[float]:
        return [median(values) for values in zip(*map(attrgetter(name), blocks), strict=True)]

    return _Speeds(
        samples=medians("samples"),
        forward=medians("forward"),
        backward=medians("backward"),
        compute=medians("compute"),
        step_ms=median([block.step_ms for block in blocks]),
    )


def _is_in_proportion(speeds: _Speeds, index: int) -> bool:
    """Whether forward and backward pass of a rank are both longer: one alone is code that only this rank runs."""
    fastest = min(range(len(speeds.compute)), key=speeds.compute.__getitem__)
    forward, backward = speeds.forward[fastest], speeds.backward[fastest]
    if min(forward, backward) <= limit.NEGLIGIBLE_SHARE * (forward + backward):
        return True
    # The ratio of both relative excesses, multiplied out.
    excess = (speeds.forward[index] - forward) * backward, (speeds.backward[index] - backward) * forward
    return max(excess) < limit.MIN_PHASE_RATIO * min(excess)


def _symptom(state: RunState, ranks: Sequence[int], speeds: _Speeds, *, step: int) -> Symptom:
    shares = speeds.balanced()
    gain_ms = speeds.gain_ms(shares)
    then_ms, gain_share = speeds.step_ms - gain_ms, gain_ms / speeds.step_ms
    slow = [index for index, share in enumerate(shares) if share < speeds.samples[index]]
    fast = [index for index in range(len(ranks)) if index not in slow]
    # In the time in which the faster ranks do their samples.
    time_ms = median([speeds.compute[index] * speeds.samples[index] for index in fast])
    done = [time_ms / each for each in speeds.compute]
    others = f"rank {ranks[fast[0]]} does" if len(fast) == 1 else "the others do"
    how = "shares by speed" if state.plan is None else 'batch_size = "balanced"'
    return Symptom(
        kind="uneven_speeds",
        ranks=[ranks[index] for index in slow],
        value=gain_share,
        threshold=limit.SPEED_GAIN_SHARE,
        severity="critical" if gain_share >= limit.IMBALANCE_CRITICAL_SHARE else "warning",
        step=step,
        message=f"{ranks_text([ranks[index] for index in slow])} {'does' if len(slow) == 1 else 'do'} "
        f"{_range(done, slow)} samples in the time in which {others} {_range(done, fast)}: "
        f"{how} would take a step from {speeds.step_ms:.0f} to {then_ms:.0f} ms",
        evidence={
            "step_ms": speeds.step_ms,
            "balanced_step_ms": then_ms,
            "gain_share": gain_share,
            "least_samples": min(done),
            "most_samples": max(done),
        },
        advice=ADVICE["uneven_speeds_script" if state.plan is None else "uneven_speeds"],
    )


def _range(values: Sequence[float], part: Sequence[int]) -> str:
    """Return the values at some indices as ``31`` or ``24 to 48``."""
    low, high = f"{min(values[i] for i in part):,.0f}", f"{max(values[i] for i in part):,.0f}"
    return low if low == high else f"{low} to {high}"
