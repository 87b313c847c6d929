"""Detects stragglers: ranks with an excess of work over the other ranks' median that is significant against noise."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence, Set
from itertools import accumulate, islice
from statistics import median

from msgspec.structs import replace

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.broadcast import BroadcastWait
from gputrain_tui.diagnosis.causes import Cause, cause_of, known_cause
from gputrain_tui.diagnosis.row import PHASES, StepRow, base_ms
from gputrain_tui.diagnosis.statistics import jitter, spread
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.diagnosis.thresholds import WINDOW_ROWS
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RunState
from gputrain_tui.state.process_groups import RankGroups
from gputrain_tui.tables import ranks_text


def stragglers(
    state: RunState,
    timeline: Timeline,
    *,
    uneven: bool = False,
    known: Set[int] = frozenset(),
    throttled: Set[int] = frozenset(),
    crowded: Set[int] = frozenset(),
    slowness: Sequence[float] = (),
) -> list[Symptom]:
    """Return the late ranks, each with its cause if that is known.

    Rows whose waits for the synchronisation were not measured are skipped. Where work is known to be uneven, a rank may
    by chance be late in most steps of a window, but not in those of several.

    Args:
        state: of the run.
        timeline: its rows.
        uneven: whether work is known to be uneven.
        known: ranks that were late before, with which the others are not compared.
        throttled: ranks that a CPU quota holds back.
        crowded: ranks that share too few cores, and so are late only if it is by more than ``OVERWHELMING_SHARE``.
        slowness: by index, how many times as long as the fastest a rank computes by nature, which is no lateness.
    """
    while True:
        symptoms = [
            symptom
            for symptom in _stragglers(
                state, timeline, uneven=uneven, known=known, throttled=throttled, slowness=slowness
            )
            if symptom.rank not in crowded or symptom.evidence["excess_share"] >= limit.OVERWHELMING_SHARE
        ]
        certain = {each.rank for each in symptoms if each.rank is not None and each.is_certain}
        if certain <= known:
            return symptoms
        known = certain | known


def _stragglers(
    state: RunState,
    timeline: Timeline,
    *,
    uneven: bool,
    known: Set[int],
    throttled: Set[int],
    slowness: Sequence[float],
) -> list[Symptom]:
    if len(timeline.ranks) < 2 or not any(row.synced for row in timeline.last(WINDOW_ROWS)):
        return []
    rows = [row.at_one_speed(slowness) if slowness else row for row in timeline.rows if row.synced]
    if len(rows) < limit.SHORT_WINDOW_ROWS + _OwnWork.earlier_rows:
        return []
    broadcast = BroadcastWait.detect(rows[-WINDOW_ROWS:])
    if broadcast is not None:
        rows = [row.without_broadcast_wait(broadcast.leader, broadcast.followers) for row in rows]
    if indices := frozenset(index for index, rank in enumerate(timeline.ranks) if rank in known):
        rows = [row.with_stragglers(indices) for row in rows]
    works = _OwnWork(state, timeline.ranks, rows, uneven=uneven)
    waits = _core_wait_excess(rows)
    symptoms = []
    for index, rank in enumerate(timeline.ranks):
        symptom = works.symptom(index)
        if symptom is not None and broadcast is not None and index == broadcast.leader:
            symptom = broadcast.explain(symptom, timeline.ranks)
        if waits is not None and (symptom is None or symptom.value < symptom.threshold):
            recent = rows[-limit.CORE_WAIT_ROWS :]
            symptom = _core_wait_symptom(recent, rank, index, waits[index], throttled=rank in throttled) or symptom
        if symptom is not None:
            symptoms.append(symptom)
    return symptoms


class _OwnWork:
    """Work of each rank, compared with that of the other ranks in the last rows."""

    earlier_rows = 2
    """Rows before a short window: their noise is a difference, which needs two."""

    def __init__(self, state: RunState, ranks: Sequence[int], rows: Sequence[StepRow], *, uneven: bool) -> None:
        """Compare the work; ``uneven``: ranks are known to be late in turns."""
        self._state = state
        self._ranks = ranks
        self._rows = rows
        self._uneven = uneven
        self._batches = "_script" if state.plan is None else "_balanced" if state.shares.newest is not None else ""
        window = rows[-WINDOW_ROWS:]
        self._step_ms = base_ms(window) + median([row.core_wait_ms for row in window])
        """Duration of a step without stragglers, with its waits for a core: what a lateness is a share of."""
        self._excess_ms = _own_excess(window)
        """By index, as are those of the short window."""
        self._short = _short_window(rows)
        self._short_excess_ms = _own_excess(rows[-self._short :])
        # A straggler that few rows of several steps each have shown stands while the rows of single steps are few.
        self._enough_rows = len(rows) >= limit.MIN_STRAGGLER_ROWS or rows[-1].straggling
        self._enough_for_short = len(rows) >= self._short + self.earlier_rows and not uneven

    def symptom(self, index: int) -> Symptom | None:
        """Return the symptom of a rank with longer work of its own, by the shortest window that shows it."""
        symptom = None
        excess_ms, short_ms = self._excess_ms[index], self._short_excess_ms[index]
        if self._enough_for_short and short_ms >= limit.OVERWHELMING_SHARE * (self._step_ms + short_ms):
            symptom = self._over(index, self._short)
            if symptom.cause == "unattributed":  # may be a momentary load of the machine: reported when it lasts
                symptom = None
        gate = limit.STRAGGLER_SHARE * (self._step_ms + max(excess_ms, 0.0))
        if symptom is None and self._enough_rows and excess_ms >= gate / 2:
            symptom = self._over(index, WINDOW_ROWS)
        if self._enough_rows and (symptom is None or not symptom.is_certain) and excess_ms >= gate:
            late = [row.own_excess[index] for row in self._rows]
            if length := _rows_late_beyond_chance(late, gate):
                symptom = self._over(index, length, varying=True)
        return symptom

    def _over(self, index: int, length: int, *, varying: bool = False) -> Symptom:
        """Return the symptom of a rank over the last ``length`` rows.

        ``varying``: it is late in more of the rows than by chance, however unlike from row to row.
        """
        rank, window = self._ranks[index], self._rows[-length:]
        late = [row.own_excess[index] for row in self._rows]
        recent = late[-length:]
        late_ms = median(recent)
        step_ms = self._step_ms + max(late_ms, 0.0)
        gate = limit.STRAGGLER_SHARE * step_ms
        blocks = _window_medians(late)
        straggling = [row.straggling for row in self._rows]
        noise = _noise_in_bursts(late, straggling) if varying else _noise(late, straggling)
        agreeing = [row for row, value in zip(window, recent, strict=True) if value >= late_ms / 2]
        agreed_ms = median([row.own_excess[index] for row in agreeing])  # over the same steps as ``phases``
        phases = {phase: median([row.excess(phase, index) for row in agreeing]) for phase in (*PHASES, "gc")}
        cause = cause_of(self._state, rank, agreed_ms, phases, agreeing, self._ranks)
        if cause.has_parts and agreed_ms - late_ms > limit.NEGLIGIBLE_SHARE * late_ms:
            # As the sum of the parts a reader expects the median over all steps.
            because = f"{cause.because} in the steps that take {agreed_ms:.1f} ms longer"
            cause = dataclasses.replace(cause, because=because)
        uneven = self._uneven
        if (noise > gate or uneven) and cause.name in PHASES:
            # A phase may stand out from its own noise although the sum of all phases does not.
            alone = [row.excess(cause.name, index) for row in self._rows]
            noise_alone = _noise(alone, straggling)
            uneven = uneven and noise_alone > gate
            if median(alone[-length:]) >= noise_alone:
                noise = min(noise, noise_alone)
        windows = limit.SUSTAINED_WINDOWS if uneven or late_ms < limit.ONE_WINDOW_SHARE * step_ms else 0
        if cause.name == "unattributed":
            on_gpu = (self._state.ranks[rank].device or "").startswith("cuda")
            unexplained = limit.UNEXPLAINED_WINDOWS if on_gpu else _unexplained_windows(self._rows[-WINDOW_ROWS:])
            windows = max(windows, unexplained)
        lasting = len(blocks) >= windows and all(block >= gate for block in blocks[len(blocks) - windows :])
        evidence = {
            "noise_ms": noise,
            "late_ms": median([row.late_ms(index) for row in agreeing]),
            **{f"{phase}_excess_ms": value for phase, value in phases.items() if abs(value) >= 0.05 * late_ms},
        }
        confirmed = lasting and (varying or len(agreeing) >= limit.MIN_AGREEING_SHARE * len(recent))
        symptom = _symptom(
            rank,
            late_ms,
            step_ms,
            max(gate, noise),
            cause,
            evidence,
            step=window[-1].step,
            confirmed=confirmed,
            whole_ms=median([row.step_ms for row in agreeing]),
            batches=self._batches,
        )
        return _with_waiting(symptom, self._state.ranks[rank].groups, agreeing, index, self._ranks)


def _short_window(rows: Sequence[StepRow]) -> int:
    """Return how many of the last rows cover ``WINDOW_ROWS`` steps: from ``SHORT_WINDOW_ROWS`` to ``WINDOW_ROWS``."""
    steps = list(accumulate(row.steps for row in islice(reversed(rows), WINDOW_ROWS)))
    return max(limit.SHORT_WINDOW_ROWS, min(WINDOW_ROWS, 1 + bisect_left(steps, WINDOW_ROWS)))


def _own_excess(window: Sequence[StepRow]) -> list[float]:
    return [median(late) for late in zip(*(row.own_excess for row in window), strict=True)]


def _rows_late_beyond_chance(late: Sequence[float], gate: float) -> int:
    """Return the most last rows of which a rank is late in more than by chance, 0 if there are none: the sign test.

    An even rank is later than the median of the others in half of the rows, and by more than ``gate`` (ms) in fewer.
    """
    passing, on_time = 0, 0
    for count, value in enumerate(islice(reversed(late), limit.SUSTAINED_WINDOWS * WINDOW_ROWS), 1):
        on_time += value < gate
        if count == WINDOW_ROWS and on_time > (1.0 - limit.MIN_AGREEING_SHARE) * WINDOW_ROWS:
            return 0  # it was late, and is so no more
        if count >= limit.MIN_STRAGGLER_ROWS:
            as_often = sum(math.comb(count, fewer) for fewer in range(on_time + 1))
            if as_often <= limit.CHANCE * 2**count:
                passing = count
    return passing


def _with_waiting(
    symptom: Symptom, groups: RankGroups, rows: Sequence[StepRow], index: int, ranks: Sequence[int]
) -> Symptom:
    """Return a rank's symptom with the ranks that wait for it in groups that are smaller than the world."""
    waiting: dict[str, list[int]] = {}
    for group in groups.by_name.values():
        extra: dict[int, list[float]] = {}
        for row in rows if 1 < len(group.ranks) < len(ranks) else ():
            for rank, wait in row.waiting(group, index, ranks).items():
                extra.setdefault(rank, []).append(wait)
        least_ms = symptom.value / 2
        if known := [rank for rank, waits in sorted(extra.items()) if median(waits) >= least_ms]:
            waiting[group.name] = known
    if not waiting:
        return symptom
    parts = [f"{ranks_text(of)} of {name}" for name, of in waiting.items()]
    alone = len(waiting) == 1 and all(len(of) == 1 for of in waiting.values())
    return replace(
        symptom,
        message=f"{symptom.message}; {' and '.join(parts)} {'waits' if alone else 'wait'} for it",
        evidence={**symptom.evidence, "waiting": float(len({rank for of in waiting.values() for rank in of}))},
    )


def _unexplained_windows(window: Sequence[StepRow]) -> int:
    """Return the number of windows in ``UNEXPLAINED_S``, from ``UNEXPLAINED_WINDOWS`` to those of the history."""
    window_s = sum(row.step_ms * row.steps for row in window) * 1e-3
    lasting = math.ceil(limit.UNEXPLAINED_S / max(window_s, 1e-6))
    return max(limit.UNEXPLAINED_WINDOWS, min(lasting, limit.HISTORY // WINDOW_ROWS))


def _core_wait_excess(rows: Sequence[StepRow]) -> list[float] | None:
    """Return each rank's median excess of waits for a core, ms; None while there are too few rows."""
    if len(rows) < limit.CORE_WAIT_ROWS:
        return None
    recent = rows[-limit.CORE_WAIT_ROWS :]
    return [median(waits) for waits in zip(*(row.core_wait_excess for row in recent), strict=True)]


def _core_wait_symptom(
    recent: Sequence[StepRow], rank: int, index: int, late_ms: float, *, throttled: bool
) -> Symptom | None:
    """Return the symptom of a rank with longer waits for a core, over ``CORE_WAIT_ROWS`` rows: waits come in bursts.

    ``throttled``: its CPU quota makes it wait.
    """
    if late_ms <= 0.0:
        return None
    step_ms = median([row.step_ms for row in recent])
    gate = limit.STRAGGLER_SHARE * step_ms
    if late_ms < gate / 2:
        return None
    waits = [row.core_wait_excess[index] for row in recent]
    steady = (
        min(_window_medians(waits)) >= gate
        and sum(value >= late_ms / 2 for value in waits) >= limit.CORE_WAIT_AGREEING_SHARE * limit.CORE_WAIT_ROWS
    )
    evidence = {"core_wait_excess_ms": late_ms, "late_ms": median([row.late_ms(index) for row in recent])}
    cause = known_cause("cpu_quota" if throttled else "core_wait")
    return _symptom(
        rank, late_ms, step_ms, gate, cause, evidence, step=recent[-1].step, confirmed=steady, whole_ms=step_ms
    )


def _symptom(
    rank: int,
    late_ms: float,
    step_ms: float,
    threshold: float,
    cause: Cause,
    evidence: dict[str, float],
    *,
    step: int,
    confirmed: bool,
    whole_ms: float,
    batches: str = "",
) -> Symptom:
    """Return the symptom; ``step_ms`` is a usual step with this lateness, ``whole_ms`` the one by the clock.

    ``batches`` ends the key of an advice that depends on whether a rank's batches may become smaller.
    """
    share = late_ms / step_ms
    of_whole = min(late_ms / whole_ms, 1.0) if whole_ms > 0 else share
    return Symptom(
        kind="straggler",
        rank=rank,
        value=late_ms,
        threshold=threshold,
        confirmed=confirmed,
        severity="critical" if share >= limit.STRAGGLER_CRITICAL_SHARE else "warning",
        cause=cause.name,
        step=step,
        message=f"rank {rank} takes {late_ms:.1f} ms longer than the others in each step "
        f"({percent(of_whole)} of a step), {cause.because}",
        evidence={
            "excess_ms": late_ms,
            "excess_share": of_whole,
            "threshold_ms": threshold,
            **evidence,
            **cause.evidence,
        },
        advice=ADVICE.get(cause.name + batches, ADVICE[cause.name]),
    )


def _noise(late: Sequence[float], straggling: Sequence[bool]) -> float:
    """Return the lateness over a window that noise may reach, ms; rows with a known straggler do not count for it."""
    mean_to_median = 1.2533  # of their standard errors
    step_to_step = limit.NOISE_SIGMAS * mean_to_median * jitter(late) / math.sqrt(WINDOW_ROWS)
    return max(step_to_step, _noise_in_bursts(late, straggling))


def _noise_in_bursts(late: Sequence[float], straggling: Sequence[bool]) -> float:
    """Return the lateness over a window that noise has reached before, ms; 0 with too few earlier windows."""
    earlier = [value for value, known in zip(late[:-WINDOW_ROWS], straggling[:-WINDOW_ROWS], strict=True) if not known]
    blocks = _window_medians(earlier)
    return limit.BLOCK_SIGMAS * spread(blocks) if len(blocks) >= limit.MIN_NOISE_BLOCKS else 0.0


def _window_medians(values: Sequence[float]) -> list[float]:
    """Return the medians of consecutive windows of rows, the newest last."""
    starts = range(len(values) % WINDOW_ROWS, len(values), WINDOW_ROWS)
    return [median(values[start : start + WINDOW_ROWS]) for start in starts]
