"""Detects desync, and non-finite or spiking losses."""

from __future__ import annotations

import math
from itertools import islice
from statistics import median
from typing import NamedTuple

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.statistics import jitter, spread
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.standstill import RECORD_LAG_S
from gputrain_tui.tables import ranks_text
from trainer.contract.record import Step

LEAST = {"loss": 1, "grad_norm": limit.MIN_NON_FINITE_NORMS}
"""By field, its non-finite events in a row for a finding."""
ENDED_STATES = ("finished", "failed")
"""States of a rank that records no more steps."""


def desync(state: RunState) -> list[Symptom]:
    """Return the desync symptom of ranks that only report checksums, as watched scripts do.

    Ranks that compare checksums themselves also find the first tensor that differs and raise the finding.
    """
    difference = state.desync.difference
    if difference is None:
        return []
    step, tensors, ranks = difference
    who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    return [
        Symptom(
            kind="desync",
            rank=ranks[0],
            value=1.0,
            threshold=1.0,
            severity="critical" if tensors == "parameters" else "warning",
            cause=tensors,
            step=step,
            message=f"{who} different {tensors} than the others",
            advice=ADVICE["desync"],
        )
    ]


class NonFinite:
    """Detects losses and gradient norms that became non-finite; events say so, since the record has no such numbers."""

    def __init__(self) -> None:
        self._trails: dict[int, dict[str, _Trail]] = {}
        """By rank and field (``loss`` or ``grad_norm``), its non-finite events up to the newest one."""
        self._read: dict[int, int] = {}
        self._first: int | None = None
        """Rank in the current finding."""

    def symptoms(self, state: RunState, now: float) -> list[Symptom]:
        """Return one symptom for all ranks: through the reduced gradients a non-finite number reaches every rank.

        It is of the ranks in which the numbers began, so it is confirmed once every rank that goes on has recorded that
        step, or has recorded nothing for so long that it may have stopped.
        """
        for view in state.ranks.values():
            self._follow(view)
        # A non-finite loss comes first: it makes the gradient norm of the same step non-finite, too.
        begins = {
            rank: min((trail.step, name != "loss") for name, trail in trails.items() if trail.events >= LEAST[name])
            for rank, trails in self._trails.items()
            if any(trail.events >= LEAST[name] for name, trail in trails.items())
        }
        if not begins:
            self._first = None
            return []
        if self._first not in begins or begins[self._first] > min(begins.values()):
            self._first = min(begins, key=lambda rank: (begins[rank], rank))
        step, is_norm = begins[self._first]
        name, quantity = ("grad_norm", "gradient norm") if is_norm else ("loss", "loss")
        ranks = sorted(rank for rank, trails in self._trails.items() if name in trails and trails[name].step == step)
        who = f"all {len(ranks)} ranks" if 1 < len(ranks) == len(state.ranks) else ranks_text(ranks)
        going = [view for view in state.ranks.values() if view.last is not None and view.state not in ENDED_STATES]
        began = self._trails[self._first][name].time
        return [
            Symptom(
                kind="non_finite",
                rank=self._first,
                ranks=ranks if len(ranks) > 1 else [],
                value=1.0,
                threshold=1.0,
                confirmed=all(view.step >= step for view in going) or now - began > RECORD_LAG_S,
                severity="critical",
                cause=name,
                step=step,
                message=f"the {quantity} of {who} has been NaN or infinite since step {step}: so are the weights once "
                "such a step is applied",
                evidence={"first_step": float(step), "ranks": float(len(begins))},
                advice=ADVICE["non_finite"].format(step=step),
            )
        ]

    def _follow(self, view: RankView) -> None:
        """Read a rank's new events: a finite number ends a trail, an event without the number changes nothing."""
        new = min(view.events - self._read.get(view.rank, 0), len(view.steps))
        self._read[view.rank] = view.events
        if not view.steps:
            self._trails.pop(view.rank, None)
        for event in islice(view.steps, len(view.steps) - new, None):
            trails = self._trails.setdefault(view.rank, {})
            for name in LEAST:
                if name in event.non_finite and not (name == "loss" and event.losses and event.losses[-1] is not None):
                    before = trails.get(name)
                    begin = before or _Trail(_first_step(event, name), 0, event.time)
                    trails[name] = begin._replace(events=begin.events + 1)
                elif name in event.non_finite or _is_number(getattr(event, name)):
                    trails.pop(name, None)


class _Trail(NamedTuple):
    """Non-finite numbers of a rank, up to its newest measured one."""

    step: int
    events: int
    time: float
    """Time of the first such event, Unix seconds."""


def _first_step(event: Step, name: str) -> int:
    """Return the first step of an event whose number is not finite, as far as it has single numbers."""
    begin = event.step - event.steps + 1
    singles = event.losses if name == "loss" else None
    return next((begin + index for index, loss in enumerate(singles or ()) if not _is_number(loss)), begin)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def loss_spikes(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return a jump of the newest mean losses over the ranks against the earlier ones."""
    losses = list(timeline.losses)
    if len(losses) < limit.MIN_EARLIER_EVENTS + limit.SPIKE_EVENTS:
        return []
    before, newest = losses[: -limit.SPIKE_EVENTS], losses[-limit.SPIKE_EVENTS :]
    usual = median(before)
    noise = max(spread(before), jitter(before))
    threshold = max(limit.SPIKE_SIGMAS * noise, limit.MIN_SPIKE_SHARE * abs(usual))
    height = median(newest) - usual
    if threshold <= 0.0 or height < threshold / 2:
        return []
    return [
        Symptom(
            kind="loss_spike",
            value=height,
            threshold=threshold,
            confirmed=min(newest) - usual >= threshold / 2,
            step=state.step,
            message=f"the loss jumped from {usual:.4g} to {median(newest):.4g}"
            + (f" {state.loss_unit}" if state.loss_unit else ""),
            evidence={"loss": median(newest), "usual_loss": usual, "loss_noise": noise},
            advice=ADVICE["loss_spike"],
        )
    ]
