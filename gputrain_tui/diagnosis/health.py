"""Detects desync, and non-finite or spiking losses."""

from __future__ import annotations

import math

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.statistics import jitter, median, spread
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RankView, RunState
from trainer.contract.record import Step

MIN_EARLIER_EVENTS = 20
"""Step events with a finite loss that must precede a non-finite loss, or a jump, for a finding."""
MIN_KNOWN_SHARE = 0.75
"""Share of the preceding step events that must have a finite value."""
MIN_NORM_EVENTS = 3
"""Step events without a finite gradient norm for a finding: a loss scaler skips some steps, on overflow."""
SPIKE_EVENTS = 3
"""Step events that a jump must last: a single hard batch is no finding."""
SPIKE_SIGMAS = 10.0
"""Height of a jump in standard deviations of the losses before it."""
MIN_SPIKE_SHARE = 0.5
"""Height of a jump as a share of the loss before it."""


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
    """Detects losses and gradient norms that became non-finite: the record leaves such numbers out."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[str, int]] = {}
        """By rank, the field that is not finite (``loss`` or ``grad_norm``) and its first such step."""
        self._first: int | None = None
        """Rank in the current finding."""

    def symptoms(self, state: RunState) -> list[Symptom]:
        """Return one symptom for all ranks: through the reduced gradients a non-finite number reaches every rank."""
        for view in state.ranks.values():
            newest = next((event for event in reversed(view.steps) if event.samples), None)
            name, _ = self._since.get(view.rank, ("", 0))
            if newest is None or (name and _is_number(getattr(newest, name))):
                self._since.pop(view.rank, None)
            elif not name and (since := _non_finite_since(view, newest)) is not None:
                self._since[view.rank] = since
        if not self._since:
            self._first = None
            return []
        # A non-finite loss comes first: it makes the gradient norm of the same step non-finite, too.
        begins = {rank: (step, name != "loss") for rank, (name, step) in self._since.items()}
        if self._first not in begins or begins[self._first] > min(begins.values()):
            self._first = min(begins, key=lambda rank: (begins[rank], rank))
        name, step = self._since[self._first]
        quantity = "loss" if name == "loss" else "gradient norm"
        others = sum(begin == begins[self._first] for begin in begins.values()) - 1
        who = f"rank {self._first}" + (f" and of {others:,} other rank{'s' * (others > 1)}" if others else "")
        return [
            Symptom(
                kind="non_finite",
                rank=self._first,
                value=1.0,
                threshold=1.0,
                severity="critical",
                cause=name,
                step=step,
                message=f"the {quantity} of {who} has been NaN or infinite since step {step}: so are the weights once "
                "such a step is applied",
                evidence={"first_step": float(step), "ranks": float(len(self._since))},
                advice=ADVICE["non_finite"].format(step=step),
            )
        ]


def _non_finite_since(view: RankView, newest: Step) -> tuple[str, int] | None:
    """Return the field of a rank that became non-finite, and its first such step; None if none did."""
    for name, least in (("loss", 1), ("grad_norm", MIN_NORM_EVENTS)):
        oldest = next(event for event in view.steps if event.samples)
        if _is_number(getattr(newest, name)) or not _is_number(getattr(oldest, name)):
            continue
        events = [event for event in view.steps if event.samples]
        known = [_is_number(getattr(event, name)) for event in events]
        begin = len(known) - known[::-1].index(True)
        # A norm that is measured now and then is absent from most steps.
        if sum(known) >= max(MIN_EARLIER_EVENTS, MIN_KNOWN_SHARE * begin) and len(events) - begin >= least:
            return name, events[begin].step
    return None


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def loss_spikes(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return a jump of the newest mean losses over the ranks against the earlier ones."""
    losses = list(timeline.losses)
    if len(losses) < MIN_EARLIER_EVENTS + SPIKE_EVENTS:
        return []
    before, newest = losses[:-SPIKE_EVENTS], losses[-SPIKE_EVENTS:]
    usual = median(before)
    noise = max(spread(before), jitter(before))
    threshold = max(SPIKE_SIGMAS * noise, MIN_SPIKE_SHARE * abs(usual))
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
