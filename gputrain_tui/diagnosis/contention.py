"""Detects hosts on which ranks wait for cores because there are more busy threads than cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.state import RunState
from trainer.contract.record import NodeSample, RankSample


class Contention:
    """Detects waits for cores, host by host, once per sample."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[NodeSample]] = {}
        self._found: dict[int, Symptom | None] = {}

    def symptoms(self, state: RunState) -> list[Symptom]:
        """Return the hosts with fewer cores than busy threads."""
        for node, sample in state.nodes.items():
            kept = self._samples.setdefault(node, deque(maxlen=limit.CORE_WAIT_SAMPLES))
            if kept and kept[-1] is sample:
                continue
            if not any(state.ranks[each.rank].steps for each in sample.ranks):
                kept.clear()  # all ranks load torch at once while they start
            kept.append(sample)
            threads = max((state.ranks[each.rank].threads or 0 for each in sample.ranks), default=0)
            self._found[node] = _symptom(kept, alone=len(state.nodes) == 1, step=state.step, set_threads=threads)
        return [symptom for symptom in self._found.values() if symptom is not None]


def _symptom(samples: Sequence[NodeSample], *, alone: bool, step: int, set_threads: int) -> Symptom | None:
    """Return the symptom of a host; None where its cores suffice, or are not known.

    ``set_threads`` is the most threads on which torch computes in a rank; 0 where they are not known.
    """
    known = [each for each in samples if any(rank.wait_percent is not None for rank in each.ranks)]
    newest = samples[-1]
    if len(known) < limit.CORE_WAIT_SAMPLES or not newest.cores:
        return None
    waits = [median([rank.wait_percent or 0.0 for rank in each.ranks]) / 100 for each in known]
    share, cores, ranks = median(waits), newest.cores, len(newest.ranks)
    if share < limit.CLEAR_SHARE * limit.MIN_CORE_WAIT_SHARE:
        return None
    own = median([sum(map(_busy_threads, each.ranks)) for each in known])
    others = median([(each.other_cpu_percent or 0.0) / 100 for each in known])
    if own + others < limit.MIN_THREAD_EXCESS * cores:
        return None
    who = f"the {ranks} ranks on {newest.host} wait" if ranks > 1 else f"the rank on {newest.host} waits"
    taken = others >= limit.MIN_OTHERS_SHARE * cores
    and_others = f", {others:.1f} of them in other processes," if taken else ""
    threads = max(1, int((cores - others if taken else cores) / ranks))
    is_set = 0 < set_threads <= threads
    workers = None if newest.ranks[0].children is None else sum(rank.children or 0 for rank in newest.ranks)
    remedies = _remedies(ranks, cores, own / ranks, None if is_set else threads, taken=taken, workers=workers)
    return Symptom(
        kind="cpu_contention",
        rank=None if alone else min(rank.rank for rank in newest.ranks),
        host=newest.host,
        value=share,
        threshold=limit.MIN_CORE_WAIT_SHARE,
        confirmed=sum(each >= share / 2 for each in waits) >= limit.MIN_AGREEING_SHARE * len(waits),
        severity="info" if not remedies else "critical" if share >= limit.CRITICAL_CORE_WAIT_SHARE else "warning",
        cause="core_wait",
        step=step,
        message=f"{who} {percent(share)} of the time for a free core: {own + others:.1f} threads{and_others} are busy "
        f"on {cores} core{'s' * (cores != 1)}",
        evidence={
            "core_wait_share": share,
            "busy_threads": own + others,
            "cores": float(cores),
            "ranks": float(ranks),
            "other_cpu_percent": 100 * others,
            **({} if is_set else {"threads_to_set": float(threads)}),
        },
        advice="; ".join(remedies) or "nothing in the run's settings takes more cores than this host has",
    )


def _busy_threads(rank: RankSample) -> float:
    """Return the busy threads of a rank; where they were not counted, a lower bound from its use of cores."""
    if rank.busy_threads is not None:
        return rank.busy_threads
    return ((rank.cpu_percent or 0.0) + (rank.wait_percent or 0.0)) / 100


def _remedies(
    ranks: int, cores: int, busy: float, threads: int | None, *, taken: bool, workers: int | None
) -> list[str]:
    """Return the remedies that are not followed yet, the likeliest first.

    ``busy`` are the busy threads of a rank, and ``threads`` those to set for it, None where no more are set. ``taken``:
    other processes take a good part of the cores. ``workers`` are child processes; None where they were not counted.
    """
    remedies = []
    if ranks > cores:  # even one thread per rank is too many
        most = f"at most {cores} rank{'s' * (cores != 1)}"
        remedies.append(f"start {most} on this host, one per core (cpu_ranks = {cores}, threads = 1)")
    elif threads is not None and (busy >= threads + 0.5 or not taken):
        about = f": about {busy:.0f} threads of each rank are busy" if busy >= threads + 0.5 else ""
        remedies.append(f"set threads = {threads} (for a script OMP_NUM_THREADS={threads}){about}")
    if taken:
        fewer = "use fewer loader workers (num_workers) and " if workers != 0 else ""
        remedies.append(f"{fewer}stop other jobs on this host")
    return remedies
