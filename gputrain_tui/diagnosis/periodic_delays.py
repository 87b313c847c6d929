"""Detects a rank of a script for which the others wait once in so many steps, as for one that saves or logs alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE, CAUSE_NAMES
from gputrain_tui.diagnosis.row import PHASES, StepRow
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RunState


class PeriodicDelays:
    """The last delays of a single rank, and whether they come at equal distances.

    A delay is longer than a usual step, and in too few steps for the medians of a straggler. Other work on a machine
    delays one rank or another, and at unequal distances. A task is saved and validated between steps, and its first
    steps after that may be longer on one rank.
    """

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._delays: deque[_Delay] = deque(maxlen=4 * limit.DELAYS)
        self._stepping_ms = 0.0

    def symptoms(self, state: RunState, timeline: Timeline, added: Sequence[StepRow]) -> Sequence[Symptom]:
        """Return the rank that the others have waited for in the last delays; its part of the time is the value."""
        if timeline.ranks != self._ranks:
            self._ranks = timeline.ranks
            self._delays.clear()
        if not timeline.rows or len(timeline.ranks) < 2 or state.plan is not None:
            return []
        usual_ms = median([row.step_ms for row in timeline.rows])
        for row in added:
            self._follow(row, usual_ms)
        if len(self._delays) < limit.DELAYS:
            return []
        # Much shorter ones are other work on the machine.
        least_ms = sorted([each.late_ms for each in self._delays])[-limit.DELAYS] / 2
        delays = [each for each in self._delays if each.late_ms >= least_ms][-limit.DELAYS :]
        first, last, others = delays[0], delays[-1], delays[1:]
        distances = [after.step - before.step for before, after in pairwise(delays)]
        distance = median(distances)
        # A delay is known to be in one of the steps of an event.
        unsure = max(each.steps for each in delays)
        regular = 3 * unsure <= distance and all(
            abs(each - distance) <= unsure - 1 + distance * limit.DISTANCE_SHARE for each in distances
        )
        is_over = timeline.rows[-1].step > last.step + 2 * distance
        if is_over or not regular or len({each.rank_index for each in delays}) > 1:
            return []
        rank = timeline.ranks[first.rank_index]
        late_ms, period_ms = median([each.late_ms for each in others]), (last.at_ms - first.at_ms) / len(others)
        # As with local SGD the others may meet a rank seldom that is late in each step: that is a straggler.
        each_step_ms = median([row.own_excess[first.rank_index] for row in timeline.rows])
        if distance * each_step_ms >= late_ms / 2:
            return []
        share = min(late_ms / period_ms, 1.0)
        phase = max(PHASES, key=lambda name: median([each.excess_ms[name] for each in others]))
        explained = median([each.excess_ms[phase] for each in others]) >= limit.MIN_EXPLAINED_SHARE * late_ms
        because = f" because of {CAUSE_NAMES[phase]}" if explained and phase != "other" else ""
        return [
            Symptom(
                kind="periodic_delay",
                rank=rank,
                value=share,
                threshold=limit.STRAGGLER_SHARE,
                severity="critical" if share >= limit.STRAGGLER_CRITICAL_SHARE else "warning",
                cause=phase if explained else None,
                step=last.step,
                message=f"rank {rank} takes {late_ms / 1e3:.2g} s longer than the others once in {distance:.0f} steps"
                f"{because}, and they wait for it: {percent(share)} of the time",
                evidence={"excess_ms": late_ms, "every_steps": distance, "period_ms": period_ms},
                advice=ADVICE["periodic_delay"],
            )
        ]

    def _follow(self, row: StepRow, usual_ms: float) -> None:
        waits = [each.exposed for each in row.phases if each.exposed is not None]
        self._stepping_ms += row.steps * max(each.step for each in row.phases)
        if len(waits) < len(row.phases) or row.synchronised:  # not all ranks wait for each other
            return
        index = waits.index(min(waits))
        late_ms = row.steps * (median(waits[:index] + waits[index + 1 :]) - waits[index])
        if late_ms >= usual_ms:
            excess_ms = {name: row.steps * row.excess(name, index) for name in PHASES}
            self._delays.append(_Delay(row.step, row.steps, index, late_ms, self._stepping_ms, excess_ms))


class _Delay(NamedTuple):
    """Steps in which one rank came later than the others by more than a usual step."""

    step: int
    """The last one."""
    steps: int
    rank_index: int
    late_ms: float
    at_ms: float
    """Time of stepping before it and in it."""
    excess_ms: dict[str, float]
    """By phase, over the other ranks' median."""
