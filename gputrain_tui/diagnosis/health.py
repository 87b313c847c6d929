"""What goes wrong without anybody being slow: numbers that are none, a loss that jumps, memory that only grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.diagnosis.timeline import jitter, spread
from gputrain_tui.state import RankView, RunState

USUAL = 20
"""Step events with a loss that must precede one without before its absence means something."""
HELD = 3
"""Step events that a jump must last: a single hard batch is no finding."""
SPIKE_SIGMAS = 10.0
SPIKE_SHARE = 0.5
"""Least height of a jump as a share of the loss before it."""
BLOCKS = 6
"""Equal parts of the time in which memory is watched; it must have grown from each to the next."""
LEAST_SAMPLES = 90
"""Machine samples, one a second, before memory is judged."""
SETTLING = 30
"""First samples after the first step that are passed over: caches fill, optimizers make their state."""
GROWTH = 0.10
"""Share of the memory at first by which it must have grown."""
STEADY = 0.5
"""Least growth from one part to the next, against the mean: memory that fills up and stays grows ever less."""
GROWTH_SIGMAS = 5.0


def health(state: RunState) -> list[Symptom]:
    """Return what is wrong with numbers and memory."""
    found = []
    for rank in sorted(state.ranks):
        view = state.ranks[rank]
        found += [symptom for symptom in (_non_finite(view), memory_creep(view)) if symptom is not None]
    if (spike := _spike(state)) is not None:
        found.append(spike)
    return found


def _non_finite(view: RankView) -> Symptom | None:
    """A number that is none cannot stand in the record: it is absent where it always was."""
    events = list(view.steps)
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = [getattr(event, name) for event in events if event.samples]
        if len(values) <= USUAL:
            continue
        bad = [value is None or not math.isfinite(value) for value in values]
        first = bad.index(True) if any(bad) else None
        if first is None or not bad[-1] or first < USUAL:
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


def _spike(state: RunState) -> Symptom | None:
    """Compare the newest losses, means over the ranks, with those before."""
    series = [[event.loss for event in view.steps] for view in state.ranks.values()]
    count = min((len(losses) for losses in series), default=0)
    if count < USUAL + HELD:
        return None
    rows = zip(*(losses[-count:] for losses in series), strict=True)
    means = [_mean([value for value in row if value is not None and math.isfinite(value)]) for row in rows]
    losses = [value for value in means if value is not None]
    if len(losses) < USUAL + HELD:
        return None
    before, newest = losses[:-HELD], losses[-HELD:]
    usual = median(before)
    noise = max(spread(before), jitter(before))
    threshold = max(SPIKE_SIGMAS * noise, SPIKE_SHARE * abs(usual))
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def memory_creep(view: RankView) -> Symptom | None:
    """Judge the memory of a rank's process and of its GPU; the one that grows more is told."""
    candidates = [
        symptom
        for what, series in (("process", view.rss_bytes), ("GPU", view.gpu_bytes))
        if (symptom := _creep(view, what, list(series)[SETTLING:])) is not None
    ]
    return max(candidates, key=lambda symptom: symptom.value, default=None)


def _creep(view: RankView, what: str, samples: Sequence[tuple[float, int]]) -> Symptom | None:
    if len(samples) < LEAST_SAMPLES:
        return None
    size = len(samples) // BLOCKS
    blocks = [[used for _, used in samples[start : start + size]] for start in range(0, size * BLOCKS, size)]
    levels = [median(block) for block in blocks]
    growth = levels[-1] - levels[0]
    mean = growth / (BLOCKS - 1)
    grown = growth / levels[0] if levels[0] > 0 else 0.0
    if grown < GROWTH / 2:
        return None
    noise = median([jitter([float(used) for used in block]) for block in blocks])
    seconds = samples[-1][0] - samples[0][0]
    per_hour = growth / max(seconds * (BLOCKS - 1) / BLOCKS, 1.0) * 3600
    return Symptom(
        kind="memory_creep",
        rank=view.rank,
        value=grown,
        threshold=GROWTH,
        confirmed=growth >= GROWTH_SIGMAS * noise and all(b - a >= STEADY * mean for a, b in pairwise(levels)),
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
