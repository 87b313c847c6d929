"""Detects uneven work: ranks that are late in turns, so that every step waits for some rank.

In a step all ranks that wait for each other wait for the last one. The wait of that one is the transfer; the additional
wait of the others is lateness, of a straggler if the same rank is always last, and otherwise of imbalance. Averaged
over steps, the least mean wait of any rank less the mean of the least waits is the imbalance, also beside stragglers:
each step would be shorter by it if the same work were spread evenly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.row import StepRow
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.diagnosis.thresholds import IMBALANCE_BLOCK_ROWS, IMBALANCE_BLOCKS
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.tables import ranks_text


class _StepBlock(NamedTuple):
    """Sums over ``IMBALANCE_BLOCK_ROWS`` rows, ms."""

    waits: Sequence[float]
    """Sum of the waits for the synchronisation, per rank."""
    least: Sequence[float]
    """Sum of the waits of the last rank of each step, per set of ranks that wait for each other."""


class Imbalance:
    """Detects uneven work, block by block."""

    def __init__(self) -> None:
        self._sets: Sequence[Sequence[int]] = ()
        """Ranks that wait for each other, by index."""
        self._start(0)

    def _start(self, ranks: int) -> None:
        self._blocks: deque[_StepBlock] = deque(maxlen=IMBALANCE_BLOCKS)
        self._begin_block(ranks)
        self._symptom: Symptom | None = None

    def _begin_block(self, ranks: int) -> None:
        self._waits = [0.0] * ranks
        self._least = [0.0] * len(self._sets)
        self._rows = 0
        """Rows in the block that is not complete."""

    def symptoms(self, timeline: Timeline, added: Sequence[StepRow], *, throttled: bool = False) -> list[Symptom]:
        """Return the symptom of uneven work; ``added``: the rows since the last call, in order.

        ``throttled``: a CPU quota holds ranks back, each at other times, so that these rows show nothing about work.
        """
        if len(self._waits) != len(timeline.ranks) or not timeline.rows or throttled:
            self._start(len(timeline.ranks))
        if throttled:
            return []
        for row in added:
            if len(row.phases) < 2 or not row.synced or not row.waits:
                continue
            sets = row.synchronised or (range(len(row.phases)),)
            if sets != self._sets:
                self._sets = sets
                self._start(len(row.phases))
            waits = row.waits_with_cores
            self._waits = [total + wait for total, wait in zip(self._waits, _means(waits), strict=True)]
            self._least = [
                total + fmean(min([each[index] for index in members]) for each in waits)
                for total, members in zip(self._least, sets, strict=True)
            ]
            self._rows += 1
            if self._rows == IMBALANCE_BLOCK_ROWS:
                self._blocks.append(_StepBlock(self._waits, self._least))
                self._begin_block(len(row.phases))
                self._symptom = _symptom(timeline, self._blocks, sets)
        return [self._symptom] if self._symptom is not None else []


def _symptom(timeline: Timeline, blocks: Sequence[_StepBlock], sets: Sequence[Sequence[int]]) -> Symptom | None:
    """Return the symptom of uneven work over some blocks; None where its cost is far below the threshold.

    Of several sets of ranks that wait for each other, it is of the one that loses most.
    """
    if len(blocks) < IMBALANCE_BLOCKS:
        return None
    rows = [row for row in timeline.rows if row.synced and row.waits][-IMBALANCE_BLOCKS * IMBALANCE_BLOCK_ROWS :]
    totals = [sum(waits) for waits in zip(*(block.waits for block in blocks), strict=True)]
    lost = [
        min([totals[index] for index in members]) - sum(block.least[number] for block in blocks)
        for number, members in enumerate(sets)
    ]
    number = lost.index(max(lost))
    members, lost_ms = sets[number], lost[number] / (IMBALANCE_BLOCKS * IMBALANCE_BLOCK_ROWS)
    step_ms = fmean(row.step_ms for row in rows)
    share = lost_ms / step_ms if step_ms > 0.0 else 0.0
    if share < limit.CLEAR_SHARE * limit.IMBALANCE_SHARE:
        return None
    mean_ms = fmean(totals[index] for index in members) - min(totals[index] for index in members)
    late_ms = lost_ms + mean_ms / (IMBALANCE_BLOCKS * IMBALANCE_BLOCK_ROWS)
    merged = [row.core_wait_ms for row in rows if row.steps > 1]
    if merged and median(merged) > limit.MAX_CORE_WAIT_SHARE * late_ms:
        return None
    each_ms = [
        (min(block.waits[index] for index in members) - block.least[number]) / IMBALANCE_BLOCK_ROWS for block in blocks
    ]
    cause, sizes = _cause(rows, members)
    evidence = {"imbalance_ms": lost_ms, "step_ms": step_ms, "imbalance_share": share}
    because = "for a reason that the record does not show"
    if cause is not None:
        low, high = min(sizes), max(sizes)
        evidence |= {f"least_{cause}": low, f"most_{cause}": high}
        because = f"because they get {low:,.0f} to {high:,.0f} {cause} in a step"
    who = "ranks" if len(members) == len(timeline.ranks) else ranks_text([timeline.ranks[index] for index in members])
    return Symptom(
        kind="imbalance",
        value=share,
        threshold=limit.IMBALANCE_SHARE,
        confirmed=sum(each >= lost_ms / 2 for each in each_ms) >= limit.MIN_AGREEING_SHARE * IMBALANCE_BLOCKS,
        severity="critical" if share >= limit.IMBALANCE_CRITICAL_SHARE else "warning",
        cause=cause or "unattributed",
        step=rows[-1].step,
        message=f"{who} are late in turn, {because}: uneven work costs {percent(share)} of a step "
        f"({lost_ms:.1f} of {step_ms:.1f} ms)",
        evidence=evidence,
        advice=ADVICE[f"imbalance_{cause}" if cause is not None else "imbalance"],
    )


def _cause(rows: Sequence[StepRow], members: Sequence[int]) -> tuple[str | None, list[float]]:
    """Return ``tokens`` or ``samples`` where the size of a rank's batch explains its work, and the sizes."""
    max_ranks = 64  # more would cost time and add no certainty
    ranks = members[:: -(-len(members) // max_ranks)]
    # A rank that waits less has worked longer.
    work = _deviations([[-means[index] for index in ranks] for means in (_means(row.waits_with_cores) for row in rows)])
    for name in ("tokens", "samples"):
        sizes = [[getattr(row.phases[index], name) for index in ranks] for row in rows]
        if any(None in each for each in sizes):
            continue
        if _correlation(_deviations(sizes), work) >= limit.MIN_CORRELATION:
            return name, [size for each in sizes for size in each]
    return None, []


def _means(waits: Sequence[Sequence[float]]) -> Sequence[float]:
    return waits[0] if len(waits) == 1 else [fmean(each) for each in zip(*waits, strict=True)]


def _deviations(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value - mean for row, mean in zip(rows, map(fmean, rows), strict=True) for value in row]


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the correlation of two series with zero means; 0 if one has no variance."""
    norm = math.sqrt(sum(x * x for x in xs) * sum(y * y for y in ys))
    return sum(x * y for x, y in zip(xs, ys, strict=True)) / norm if norm > 0.0 else 0.0
