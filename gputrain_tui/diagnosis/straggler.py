"""Who makes the others wait, and with what: lateness in excess over the other ranks, significant against the noise."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, islice

from gputrain_tui.diagnosis.advice import ADVICE, NAMES
from gputrain_tui.diagnosis.broadcast import Broadcast
from gputrain_tui.diagnosis.causes import cause_of
from gputrain_tui.diagnosis.row import PHASES, CycleRow, base_ms
from gputrain_tui.diagnosis.statistics import jitter, median, spread
from gputrain_tui.diagnosis.symptom import Severity, Symptom, percent
from gputrain_tui.diagnosis.timeline import HISTORY, Timeline
from gputrain_tui.state import RunState

WINDOW = 12
"""Steps that must agree; more than half of them are over 13 steps after a rank became slow."""
SHORT_WINDOW = 6
"""Rows that do, where they stand for so many steps together and a rank is more than ``OVERWHELMING`` late."""
OVERWHELMING = 0.5
"""Share of a step: the others wait for longer than they work."""
LEAST_ROWS = 20
"""Rows to know a run by, before anything is said."""
BEFORE = 2
"""Rows before it that do for what a short window shows: from before a rank became slow."""
WARNING, CRITICAL = 0.10, 0.20
"""Share of a step that a rank is late (TraceML's gates)."""
AT_ONCE = 0.15
"""Share of a step from which one window is enough; for less, ``SUSTAINED`` windows must all show it."""
SUSTAINED = 4
UNEXPLAINED, UNEXPLAINED_S = 2, 5.0
"""Windows that must show lateness which no phase accounts for, and seconds for a rank that computes on a core.

Where all that such a rank does takes longer, it is its core that is slower. Other work on the machine, or other
guests of its host, make it so for a second or two now and then, however many steps that is.
"""
AGREEING = 0.75
"""Share of the window's steps in which the rank must be late by at least half of the median."""
STEP_SIGMAS = 6.0
"""Standard errors of the window's median, from the difference between one step and the next."""
BLOCK_SIGMAS = 4.0
"""Standard deviations of earlier windows' medians, which also tell noise that comes in bursts."""
LEAST_BLOCKS = 4
"""Earlier windows from which that can be told."""
CORE_STEPS = 8 * WINDOW
"""Steps over which a rank must have waited for a core: bursts of other work on the machine are shorter."""
CORE_AGREEING = 0.80


def stragglers(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return the ranks that are late by something, with the cause where one accounts for it.

    Nothing is said of ranks that do not wait for each other, nor of steps whose waits were not measured.
    """
    if len(timeline.ranks) < 2 or not any(row.synced for row in timeline.last(WINDOW)):
        return []
    rows = [row for row in timeline.rows if row.synced]
    if len(rows) < SHORT_WINDOW + BEFORE:
        return []
    broadcast = Broadcast.seen_in(rows[-WINDOW:])
    if broadcast is not None:
        rows = [row.relieved(broadcast.leader, broadcast.followers) for row in rows]
    window = rows[-WINDOW:]
    step_ms = base_ms(window)
    owns = _own_excess(window)
    short = _short_window(rows)
    lately = _own_excess(rows[-short:])
    merged = short < WINDOW and len(rows) >= short + BEFORE
    known = len(rows) >= LEAST_ROWS
    waits = _waits_for_cores(rows)
    found = []
    for index, rank in enumerate(timeline.ranks):
        symptom = None
        if merged and lately[index] >= OVERWHELMING * (step_ms + lately[index]):
            symptom = _slow(state, timeline.ranks, rows, index, step_ms, short)
            if symptom.cause == "unattributed":  # all phases longer for a moment: the machine, told of when it lasts
                symptom = None
        if symptom is None and known and owns[index] >= WARNING / 2 * (step_ms + max(owns[index], 0.0)):
            symptom = _slow(state, timeline.ranks, rows, index, step_ms, WINDOW)
        if symptom is not None and broadcast is not None and index == broadcast.leader:
            symptom = broadcast.told(symptom, timeline.ranks)
        if waits is not None and (symptom is None or symptom.value < symptom.threshold):
            symptom = _without_core(rows[-CORE_STEPS:], rank, index, waits[index]) or symptom
        if symptom is not None:
            found.append(symptom)
    return found


def _short_window(rows: Sequence[CycleRow]) -> int:
    """Return how many of the last rows stand for ``WINDOW`` steps: from ``SHORT_WINDOW`` to ``WINDOW``."""
    steps = list(accumulate(row.steps for row in islice(reversed(rows), WINDOW)))
    return max(SHORT_WINDOW, min(WINDOW, 1 + bisect_left(steps, WINDOW)))


def _own_excess(window: Sequence[CycleRow]) -> list[float]:
    """Return by how much each rank's own work usually exceeds the other ranks', ms."""
    return [median(late) for late in zip(*(row.own_excess for row in window), strict=True)]


def _slow(
    state: RunState, ranks: Sequence[int], rows: Sequence[CycleRow], index: int, base: float, length: int
) -> Symptom:
    """Judge what a rank itself does longer than the others.

    Args:
        state: the run.
        ranks: all of them.
        rows: the last steps.
        index: the rank's place in them.
        base: how long a step takes with a core for everybody and nobody late, ms.
        length: how many of the last rows must agree.
    """
    rank, window = ranks[index], rows[-length:]
    late = [row.own_excess[index] for row in rows]
    recent = late[-length:]
    late_ms = median(recent)
    step_ms = base + max(late_ms, 0.0)
    gate = WARNING * step_ms
    blocks = [median(late[-WINDOW * (n + 1) : len(late) - WINDOW * n]) for n in range(len(late) // WINDOW)]
    troubled = [row.troubled for row in rows]
    noise = _noise(late, troubled)
    agreeing = [row for row, value in zip(window, recent, strict=True) if value >= late_ms / 2]
    agreed_ms = median([row.own_excess[index] for row in agreeing])  # of the same steps as its phases
    phases = {phase: median([row.excess(phase, index) for row in agreeing]) for phase in (*PHASES, "gc")}
    cause = cause_of(state, rank, agreed_ms, phases, agreeing, ranks)
    if noise > gate and cause.name in PHASES:  # a phase may stand out from its own noise where all of them are noisier
        alone = [row.excess(cause.name, index) for row in rows]
        noise_alone = _noise(alone, troubled)
        if median(alone[-length:]) >= noise_alone:
            noise = min(noise, noise_alone)
    threshold = max(gate, noise)
    windows = SUSTAINED if late_ms < AT_ONCE * step_ms else 0
    if cause.name == "unattributed":
        windows = max(windows, UNEXPLAINED if _on_gpu(state, rank) else _windows_of(window, UNEXPLAINED_S))
    lasting = len(blocks) >= windows and all(block >= gate for block in blocks[:windows])
    share = late_ms / step_ms
    return Symptom(
        kind="straggler",
        rank=rank,
        value=late_ms,
        threshold=threshold,
        confirmed=lasting and len(agreeing) >= AGREEING * len(recent),
        severity=_severity(share),
        cause=cause.name,
        step=window[-1].step,
        message=f"rank {rank} is {late_ms:.1f} ms late in each step ({percent(share)} of a step), {cause.because}",
        evidence={
            "late_ms": late_ms,
            "step_ms": step_ms,
            "late_share": share,
            "threshold_ms": threshold,
            "noise_ms": noise,
            "sync_late_ms": median([row.late_ms(index) for row in agreeing]),
            **{f"{phase}_excess_ms": value for phase, value in phases.items() if abs(value) >= 0.05 * late_ms},
            **cause.evidence,
        },
        advice=ADVICE[cause.name],
    )


def _on_gpu(state: RunState, rank: int) -> bool:
    return (state.ranks[rank].device or "").startswith("cuda")


def _windows_of(window: Sequence[CycleRow], seconds: float) -> int:
    """Return how many windows like this one last that long, at least ``UNEXPLAINED`` and at most all that are kept."""
    window_s = sum(row.step_ms * row.steps for row in window) * 1e-3
    lasting = math.ceil(seconds / max(window_s, 1e-6))
    return max(UNEXPLAINED, min(lasting, HISTORY // WINDOW))


def _waits_for_cores(rows: Sequence[CycleRow]) -> list[float] | None:
    """Return by how much each rank waits longer for a core than the others; None while the steps are too few."""
    if len(rows) < CORE_STEPS:
        return None
    recent = rows[-CORE_STEPS:]
    return [median(waits) for waits in zip(*(row.core_wait_excess for row in recent), strict=True)]


def _without_core(recent: Sequence[CycleRow], rank: int, index: int, late_ms: float) -> Symptom | None:
    """Judge how much longer than the others a rank waits for a core, over a longer time: that comes in bursts."""
    if late_ms <= 0.0:
        return None
    step_ms = median([row.step_ms for row in recent])
    gate = WARNING * step_ms
    if late_ms < gate / 2:
        return None
    waits = [row.core_wait_excess[index] for row in recent]
    blocks = [median(waits[start : start + WINDOW]) for start in range(0, CORE_STEPS, WINDOW)]
    threshold = max(gate, BLOCK_SIGMAS * spread(blocks))
    steady = min(blocks) >= gate and sum(value >= late_ms / 2 for value in waits) >= CORE_AGREEING * CORE_STEPS
    share = late_ms / step_ms
    return Symptom(
        kind="straggler",
        rank=rank,
        value=late_ms,
        threshold=threshold,
        confirmed=steady,
        severity=_severity(share),
        cause="core_wait",
        step=recent[-1].step,
        message=f"rank {rank} is {late_ms:.1f} ms late in each step ({percent(share)} of a step), "
        f"because of {NAMES['core_wait']}",
        evidence={
            "late_ms": late_ms,
            "step_ms": step_ms,
            "late_share": share,
            "threshold_ms": threshold,
            "core_wait_excess_ms": late_ms,
            "sync_late_ms": median([row.late_ms(index) for row in recent]),
        },
        advice=ADVICE["core_wait"],
    )


def _severity(share: float) -> Severity:
    return "critical" if share >= CRITICAL else "warning"


def _noise(late: Sequence[float], troubled: Sequence[bool]) -> float:
    """Return how late a rank must be over a window not to be taken for noise, ms.

    Args:
        late: by how much it was at each row.
        troubled: whether a rank was known to be late at that row: faults that are over are not the machine's noise.
    """
    step_to_step = STEP_SIGMAS * 1.2533 * jitter(late) / math.sqrt(WINDOW)  # 1.2533: a median's against a mean's
    earlier = [value for value, known in zip(late[:-WINDOW], troubled[:-WINDOW], strict=True) if not known]
    starts = range(len(earlier) % WINDOW, len(earlier), WINDOW)
    blocks = [median(earlier[start : start + WINDOW]) for start in starts]
    in_bursts = BLOCK_SIGMAS * spread(blocks) if len(blocks) >= LEAST_BLOCKS else 0.0
    return max(step_to_step, in_bursts)
