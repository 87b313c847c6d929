"""Detects a rank for which the others wait in each evaluation of a script, which belongs to no step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.state import RankView, RunState


class SlowEvaluations:
    """The last evaluations of each rank, and whether one rank is late in all of them."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[int, _Spent]] = {}
        """By the step that follows the evaluation, and by rank."""
        self._read: dict[int, int] = {}

    def symptoms(self, state: RunState) -> Sequence[Symptom]:
        """Return the rank that the others wait for: its own work takes longer than theirs in each evaluation.

        Its lateness counts as a share of the time from one evaluation to the next, which it makes longer.
        """
        for view in state.ranks.values():
            self._follow(view)
        whole = [(step, spent) for step, spent in self._by_step.items() if len(spent) == len(state.ranks)]
        newest = [spent for _, spent in whole[-limit.EVALUATIONS :]]
        if len(state.ranks) < 2 or len(newest) < limit.EVALUATIONS:
            return []
        self._by_step = {step: spent for step, spent in self._by_step.items() if step >= whole[-limit.EVALUATIONS][0]}
        late = max(newest[-1], key=lambda rank: newest[-1][rank].own_s)
        excess_s = [
            spent[late].own_s - median([each.own_s for rank, each in spent.items() if rank != late]) for spent in newest
        ]
        typical_s, own_s = median(excess_s), median([spent[late].own_s for spent in newest])
        period_s = (newest[-1][late].time - newest[0][late].time) / (len(newest) - 1)
        if period_s <= 0.0:
            return []
        share = typical_s / period_s
        return [
            Symptom(
                kind="slow_evaluation",
                rank=late,
                value=share,
                threshold=limit.EVALUATION_SHARE,
                # Each time, and twice as long as the others: a busy machine delays one or another, and by less.
                confirmed=min(excess_s) >= typical_s / 2 and typical_s >= own_s / 2,
                step=state.step,
                message=f"rank {late} takes {typical_s:.1f} s longer than the others in each evaluation, and they wait "
                f"for it: {percent(share)} of the time from one evaluation to the next",
                evidence={"excess_ms": 1e3 * typical_s, "evaluation_ms": 1e3 * own_s, "period_ms": 1e3 * period_s},
                advice=ADVICE["slow_evaluation"],
            )
        ]

    def _follow(self, view: RankView) -> None:
        new = min(view.events - self._read.get(view.rank, 0), len(view.steps))
        self._read[view.rank] = view.events
        if not view.steps:
            self._by_step.clear()  # another attempt
        for event in islice(view.steps, len(view.steps) - new, None):
            if event.evaluation_ms is not None:
                spent = _Spent(event.evaluation_ms / 1e3, event.time)
                self._by_step.setdefault(event.step, {})[view.rank] = spent
                if len(self._by_step) > limit.HISTORY:  # not all ranks evaluate
                    del self._by_step[next(iter(self._by_step))]


class _Spent(NamedTuple):
    """A rank's part in an evaluation."""

    own_s: float
    """Without its waits for the other ranks."""
    time: float
    """Of the step that follows, Unix seconds."""
