"""Detects desync, non-finite or spiking losses, and growing memory."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice, pairwise

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.statistics import jitter, median, spread
from gputrain_tui.diagnosis.symptom import CLEAR_SHARE, Symptom, percent
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RankView, RunState

MIN_EARLIER_EVENTS = 20
"""Step events with a finite loss before one without counts as non-finite, and before a jump counts as a spike."""
SPIKE_EVENTS = 3
"""Step events that a jump must last: a single hard batch is no finding."""
SPIKE_SIGMAS = 10.0
"""Height of a jump in standard deviations of the losses before it."""
MIN_SPIKE_SHARE = 0.5
"""Height of a jump as a share of the loss before it."""
GROWTH_BLOCKS = 6
"""Equal blocks of the samples; memory must have grown from each to the next."""
MIN_SAMPLES = 90
"""Machine samples, one a second, before memory growth is computed."""
SETTLING_SAMPLES = 30
"""First samples after the first step that are skipped: caches fill, optimizers create their state."""
MIN_GROWTH_SHARE = 0.10
"""Growth as a share of the first block's memory."""
MIN_BLOCK_GROWTH_SHARE = 0.5
"""Growth between two blocks as a share of the mean growth: a cache that fills up grows less and less."""
GROWTH_SIGMAS = 5.0
"""Growth in standard deviations of the memory within a block."""


def desync(state: RunState) -> list[Symptom]:
    """Return the desync symptom of ranks that only report checksums, as watched scripts do.

    Ranks that compare checksums themselves also find the first tensor that differs and raise the finding.
    """
    difference = state.desync.difference
    if difference is None:
        return []
    step, what, ranks = difference
    who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    return [
        Symptom(
            kind="desync",
            rank=ranks[0],
            value=1.0,
            threshold=1.0,
            severity="critical" if what == "parameters" else "warning",
            cause=what,
            step=step,
            message=f"{who} other {what} than the rest",
            advice=ADVICE["desync"],
        )
    ]


def losses(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return non-finite losses and gradient norms, and a spike of the loss."""
    found = [_non_finite(state.ranks[rank]) for rank in sorted(state.ranks)]
    found.append(_spike(state, timeline))
    return [symptom for symptom in found if symptom is not None]


def _non_finite(view: RankView) -> Symptom | None:
    """Return a loss or gradient norm that became non-finite: the record leaves such numbers out."""
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        newest = next((event for event in reversed(view.steps) if event.samples), None)
        if newest is None or _is_number(getattr(newest, name)):
            continue
        first_event = next(event for event in view.steps if event.samples)
        if not _is_number(getattr(first_event, name)):
            continue
        events = list(view.steps)
        values = [getattr(event, name) for event in events if event.samples]
        if len(values) <= MIN_EARLIER_EVENTS:
            continue
        bad = [not _is_number(value) for value in values]
        first = bad.index(True)
        if first < MIN_EARLIER_EVENTS:
            continue
        step = [event.step for event in events if event.samples][first]
        return Symptom(
            kind="non_finite",
            rank=view.rank,
            value=1.0,
            threshold=1.0,
            severity="critical",
            cause=name,
            step=step,
            message=f"rank {view.rank} has a {what} that is not a finite number since step {step}",
            evidence={"first_step": float(step), "steps": float(sum(bad))},
            advice=ADVICE["non_finite"],
        )
    return None


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _spike(state: RunState, timeline: Timeline) -> Symptom | None:
    """Compare the newest mean losses over the ranks with the earlier ones."""
    losses = list(timeline.losses)
    if len(losses) < MIN_EARLIER_EVENTS + SPIKE_EVENTS:
        return None
    before, newest = losses[:-SPIKE_EVENTS], losses[-SPIKE_EVENTS:]
    usual = median(before)
    noise = max(spread(before), jitter(before))
    threshold = max(SPIKE_SIGMAS * noise, MIN_SPIKE_SHARE * abs(usual))
    height = median(newest) - usual
    if threshold <= 0.0 or height < threshold / 2:
        return None
    return Symptom(
        kind="loss_spike",
        value=height,
        threshold=threshold,
        confirmed=min(newest) - usual >= threshold / 2,
        step=state.step,
        message=f"the loss jumped from {usual:.4g} to {median(newest):.4g} nats",
        evidence={"loss_nats": median(newest), "usual_loss_nats": usual, "noise_nats": noise},
        advice=ADVICE["loss_spike"],
    )


class MemoryGrowth:
    """Detects growing memory of each rank's process and GPU, once per sample."""

    def __init__(self) -> None:
        self._last_symptoms: dict[tuple[int, str], tuple[float, Symptom | None]] = {}
        """By rank and kind of memory: time of the newest sample, and its symptom."""

    def symptoms(self, state: RunState) -> list[Symptom]:
        """Return the ranks whose memory grows steadily; of process and GPU the one that grows more."""
        found = []
        for view in state.ranks.values():
            candidates = (self._symptom(view, "process", view.rss_bytes), self._symptom(view, "GPU", view.gpu_bytes))
            if symptoms := [symptom for symptom in candidates if symptom is not None]:
                found.append(max(symptoms, key=lambda symptom: symptom.value))
        return found

    def _symptom(self, view: RankView, what: str, samples: deque[tuple[float, int]]) -> Symptom | None:
        if len(samples) < SETTLING_SAMPLES + MIN_SAMPLES:
            return None
        newest, _ = samples[-1]
        known = self._last_symptoms.get((view.rank, what))
        if known is None or known[0] != newest:
            known = self._last_symptoms[view.rank, what] = newest, _growth_symptom(view, what, samples)
        return known[1]


def _growth_symptom(view: RankView, what: str, samples: deque[tuple[float, int]]) -> Symptom | None:
    used = [float(each) for _, each in islice(samples, SETTLING_SAMPLES, None)]
    size = len(used) // GROWTH_BLOCKS
    last = size * (GROWTH_BLOCKS - 1)
    if median(used[last : last + size]) < (1 + CLEAR_SHARE * MIN_GROWTH_SHARE) * median(used[:size]):
        return None
    blocks = [used[start : start + size] for start in range(0, size * GROWTH_BLOCKS, size)]
    levels = [median(block) for block in blocks]
    growth = levels[-1] - levels[0]
    mean = growth / (GROWTH_BLOCKS - 1)
    grown = growth / levels[0] if levels[0] > 0 else 0.0
    noise = median([jitter(block) for block in blocks])
    seconds = samples[-1][0] - samples[SETTLING_SAMPLES][0]
    per_hour = growth / max(seconds * (GROWTH_BLOCKS - 1) / GROWTH_BLOCKS, 1.0) * 3600
    return Symptom(
        kind="memory_creep",
        rank=view.rank,
        value=grown,
        threshold=MIN_GROWTH_SHARE,
        confirmed=growth >= GROWTH_SIGMAS * noise
        and all(b - a >= MIN_BLOCK_GROWTH_SHARE * mean for a, b in pairwise(levels)),
        cause=what.lower(),
        step=view.step,
        message=f"the {what}'s memory of rank {view.rank} has grown by {percent(grown)} "
        f"in {seconds / 60:.0f} minutes and goes on growing",
        evidence={
            "first_bytes": float(levels[0]),
            "last_bytes": float(levels[-1]),
            "growth_bytes_per_hour": per_hour,
            "watched_s": seconds,
        },
        advice=ADVICE["memory_creep"],
    )
