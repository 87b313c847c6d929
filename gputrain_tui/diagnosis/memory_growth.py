"""Detects memory that goes on growing, and forecasts when it is used up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.statistics import jitter
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.state import RankView, RunState


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Growth of some memory over equal blocks of samples."""

    first_bytes: float
    """Median of the first block."""
    last_bytes: float
    watched_s: float
    per_s: float
    """Bytes a second."""
    steady: bool
    """Whether it has grown from each block to the next, and well beyond the noise."""
    lasting: bool
    """Whether it still grows about as fast as at the beginning."""

    @classmethod
    def over(cls, samples: Sequence[tuple[float, int]]) -> Growth:
        """Compute the growth over samples of time, Unix seconds, and bytes."""
        size = len(samples) // limit.GROWTH_BLOCKS
        blocks = [[float(used) for _, used in samples[size * n : size * (n + 1)]] for n in range(limit.GROWTH_BLOCKS)]
        levels = [median(block) for block in blocks]
        growth = levels[-1] - levels[0]
        mean = growth / (limit.GROWTH_BLOCKS - 1)
        half = limit.GROWTH_BLOCKS // 2
        # From the middle of the first block to that of the last.
        seconds = samples[size * (limit.GROWTH_BLOCKS - 1)][0] - samples[0][0]
        return cls(
            first_bytes=levels[0],
            last_bytes=levels[-1],
            watched_s=samples[-1][0] - samples[0][0],
            per_s=growth / max(seconds, 1.0),
            steady=growth >= limit.GROWTH_SIGMAS * median([jitter(block) for block in blocks])
            and all(b - a >= limit.MIN_BLOCK_GROWTH_SHARE * mean for a, b in pairwise(levels)),
            lasting=levels[-1] - levels[half] >= limit.MIN_LASTING_SHARE * (levels[half - 1] - levels[0]),
        )

    @property
    def grows(self) -> bool:
        return self.per_s > 0.0 and self.steady and self.lasting


class MemoryGrowth:
    """Detects growing memory of each rank's process and GPU, once per sample."""

    def __init__(self) -> None:
        self._last_symptoms: dict[tuple[int, str], tuple[float, Symptom | None]] = {}
        """By rank and kind of memory: time of the newest sample, and its symptom."""
        self._hosts: dict[int, deque[tuple[float, int]]] = {}
        """By node, the newest samples of its host's memory: time and bytes used."""

    def symptoms(self, state: RunState) -> list[Symptom]:
        """Return a symptom per rank with steadily growing memory: of its process or its GPU, whichever is worse."""
        for node, sample in state.nodes.items():
            kept = self._hosts.setdefault(node, deque(maxlen=limit.FORECAST_SAMPLES))
            if sample.memory_used_bytes is not None and (not kept or kept[-1][0] != sample.time):
                kept.append((sample.time, sample.memory_used_bytes))
        worst = []
        for view in state.ranks.values():
            candidates = (
                self._symptom(state, view, "process", view.rss_bytes),
                self._symptom(state, view, "GPU", view.gpu_bytes),
            )
            if symptoms := [symptom for symptom in candidates if symptom is not None]:
                worst.append(max(symptoms, key=lambda symptom: symptom.value))
        return worst

    def _symptom(
        self, state: RunState, view: RankView, memory: str, samples: deque[tuple[float, int]]
    ) -> Symptom | None:
        if len(samples) < limit.FORECAST_WARM_UP_SAMPLES + limit.FORECAST_SAMPLES:
            return None
        newest, _ = samples[-1]
        known = self._last_symptoms.get((view.rank, memory))
        if known is None or known[0] != newest:
            symptom = self._forecast(state, view, memory, samples)
            if symptom is None and len(samples) >= limit.GROWTH_WARM_UP_SAMPLES + limit.GROWTH_SAMPLES:
                symptom = _growth_symptom(view, memory, samples)
            known = self._last_symptoms[view.rank, memory] = newest, symptom
        return known[1]

    def _forecast(
        self, state: RunState, view: RankView, memory: str, samples: deque[tuple[float, int]]
    ) -> Symptom | None:
        """Return the symptom of memory that will be used up soon; None if it will not be, or that is unknown."""
        if memory == "GPU":
            ranks, shared, total = 1, samples, view.gpu.memory_total_bytes
            where = f"the GPU memory of rank {view.rank}"
        else:
            node = state.nodes.get(view.node or 0)
            if node is None:
                return None
            ranks, shared, total = max(len(node.ranks), 1), self._hosts[node.node], node.memory_total_bytes
            where = f"the memory of {node.host}"
        if total is None or len(shared) < limit.FORECAST_SAMPLES:
            return None
        free = max(total - shared[-1][1], 0)
        # Cheap exit: for memory that hardly grows two samples are enough.
        grown = (samples[-1][1] - samples[-limit.FORECAST_SAMPLES][1]) * ranks / limit.MIN_PART_SHARE
        if grown / limit.FORECAST_SAMPLES * limit.FORECAST_S / limit.CLEAR_SHARE < free:
            return None
        newest = list(islice(samples, len(samples) - limit.FORECAST_SAMPLES, None))
        growth = Growth.over(newest)
        # Memory that was released before may be released again.
        before = max((used for _, used in islice(samples, len(samples) - limit.FORECAST_SAMPLES)), default=0)
        if not growth.grows or newest[limit.FORECAST_SAMPLES // 2][1] < before:
            return None
        total_growth = Growth.over(list(islice(shared, len(shared) - limit.FORECAST_SAMPLES, None)))
        if not total_growth.grows or not (
            limit.MIN_PART_SHARE * growth.per_s <= total_growth.per_s <= growth.per_s * ranks / limit.MIN_PART_SHARE
        ):
            return None
        remaining_s = free / total_growth.per_s
        if remaining_s > limit.FORECAST_S / limit.CLEAR_SHARE:
            return None
        return Symptom(
            kind="memory_creep",
            rank=view.rank,
            value=limit.FORECAST_S / max(remaining_s, 1.0),
            threshold=1.0,
            severity="critical",
            cause=memory.lower(),
            step=view.step,
            message=f"the {memory} memory of rank {view.rank} grows by {growth.per_s * 60 / 2**30:.2g} GiB a minute: "
            f"at this rate {where} is used up in {_rounded(remaining_s)}",
            evidence={
                "out_of_memory_s": remaining_s,
                "free_bytes": float(free),
                "growth_bytes_per_hour": growth.per_s * 3600,
                "watched_s": growth.watched_s,
            },
            advice=ADVICE["memory_creep"],
        )


def _rounded(seconds: float) -> str:
    """Return a duration with the precision of a forecast: ``about 4 min``."""
    if seconds < 100:
        return f"about {max(10 * round(seconds / 10), 10)} s"
    return f"about {seconds / 60:.0f} min"


def _growth_symptom(view: RankView, memory: str, samples: deque[tuple[float, int]]) -> Symptom | None:
    """Return the symptom of memory that has grown slowly since the first steps."""
    warm = list(islice(samples, limit.GROWTH_WARM_UP_SAMPLES, None))
    size = len(warm) // limit.GROWTH_BLOCKS
    last = size * (limit.GROWTH_BLOCKS - 1)
    first_bytes, last_bytes = (
        median([float(used) for _, used in block]) for block in (warm[:size], warm[last : last + size])
    )
    if last_bytes < (1 + limit.CLEAR_SHARE * limit.MIN_GROWTH_SHARE) * first_bytes or first_bytes <= 0:
        return None
    growth = Growth.over(warm)
    grown = last_bytes / first_bytes - 1
    return Symptom(
        kind="memory_creep",
        rank=view.rank,
        value=grown / limit.MIN_GROWTH_SHARE,
        threshold=1.0,
        confirmed=growth.steady,
        cause=memory.lower(),
        step=view.step,
        message=f"the {memory} memory of rank {view.rank} has grown by {percent(grown)} "
        f"in {growth.watched_s / 60:.0f} minutes and is still growing",
        evidence={
            "first_bytes": growth.first_bytes,
            "last_bytes": growth.last_bytes,
            "growth_bytes_per_hour": growth.per_s * 3600,
            "watched_s": growth.watched_s,
        },
        advice=ADVICE["memory_creep"],
    )
