"""Findings that need no slow rank: desync, non-finite or spiking losses, growing memory.

Models that differ, numbers that are none, a loss that jumps, memory that only grows.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice, pairwise

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.statistics import jitter, median, spread
from gputrain_tui.diagnosis.symptom import CLEARED, Symptom, percent
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RankView, RunState

USUAL = 20
"""Step events with a loss that must precede one without before its absence means something."""
HELD = 3
"""Step events that a jump must last: a single hard batch is no finding."""
SPIKE_SIGMAS = 10.0
SPIKE_SHARE = 0.5
"""Least height of a jump as a share of the loss before it."""
BLOCKS = 6
"""Equal phases of the time in which memory is watched; it must have grown from each to the next."""
LEAST_SAMPLES = 90
"""Machine samples, one a second, before memory is judged."""
SETTLING = 30
"""First samples after the first step that are passed over: caches fill, optimizers make their state."""
GROWTH = 0.10
"""Share of the memory at first by which it must have grown."""
STEADY = 0.5
"""Least growth from one phase to the next, against the mean: memory that fills up and stays grows ever less."""
GROWTH_SIGMAS = 5.0


def desync(state: RunState) -> list[Symptom]:
    """Return that some ranks hold another model, of ranks that only tell their checksums, as watched scripts do.

    Where the ranks compare them by themselves, they also find the first tensor that differs, and have said so.
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
    """Return what is wrong with losses and gradients."""
    found = [_non_finite(state.ranks[rank]) for rank in sorted(state.ranks)]
    found.append(_spike(state, timeline))
    return [symptom for symptom in found if symptom is not None]


def _non_finite(view: RankView) -> Symptom | None:
    """A number that is none cannot stand in the record: it is absent where it always was."""
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        newest = next((event for event in reversed(view.steps) if event.samples), None)
        if newest is None or _is_number(getattr(newest, name)):
            continue
        first_event = next(event for event in view.steps if event.samples)
        if not _is_number(getattr(first_event, name)):
            continue
        events = list(view.steps)
        values = [getattr(event, name) for event in events if event.samples]
        if len(values) <= USUAL:
            continue
        bad = [not _is_number(value) for value in values]
        first = bad.index(True)
        if first < USUAL:
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
    """Compare the newest losses, means over the ranks, with those before."""
    losses = list(timeline.losses)
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


class MemoryGrowth:
    """Judges the memory of each rank's process and of its GPU whenever it was sampled anew."""

    def __init__(self) -> None:
        self._judged: dict[tuple[int, str], tuple[float, Symptom | None]] = {}
        """Per rank and kind of memory, the time of the newest sample that was judged, and what came of it."""

    def creeping(self, state: RunState) -> list[Symptom]:
        """Return whose memory only grows; of a rank's two memories the one that grows more."""
        found = []
        for view in state.ranks.values():
            candidates = (self._judge(view, "process", view.rss_bytes), self._judge(view, "GPU", view.gpu_bytes))
            if symptoms := [symptom for symptom in candidates if symptom is not None]:
                found.append(max(symptoms, key=lambda symptom: symptom.value))
        return found

    def _judge(self, view: RankView, what: str, samples: deque[tuple[float, int]]) -> Symptom | None:
        if len(samples) < SETTLING + LEAST_SAMPLES:
            return None
        newest, _ = samples[-1]
        known = self._judged.get((view.rank, what))
        if known is None or known[0] != newest:
            known = self._judged[view.rank, what] = newest, _creep(view, what, samples)
        return known[1]


def _creep(view: RankView, what: str, samples: deque[tuple[float, int]]) -> Symptom | None:
    used = [float(each) for _, each in islice(samples, SETTLING, None)]
    size = len(used) // BLOCKS
    last = size * (BLOCKS - 1)
    if median(used[last : last + size]) < (1 + CLEARED * GROWTH) * median(used[:size]):
        return None
    blocks = [used[start : start + size] for start in range(0, size * BLOCKS, size)]
    levels = [median(block) for block in blocks]
    growth = levels[-1] - levels[0]
    mean = growth / (BLOCKS - 1)
    grown = growth / levels[0] if levels[0] > 0 else 0.0
    noise = median([jitter(block) for block in blocks])
    seconds = samples[-1][0] - samples[SETTLING][0]
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
