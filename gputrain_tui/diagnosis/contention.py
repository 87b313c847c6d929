"""Detects hosts on which ranks wait for cores: more threads are busy than cores, or a cgroup's CPU quota is used up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.state import RunState
from trainer.contract.record import NodeSample, RankSample


class Contention:
    """Detects waits for cores, host by host, once per sample."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[NodeSample]] = {}
        self._found: dict[int, Symptom | None] = {}

    def symptoms(self, state: RunState) -> list[Symptom]:
        """Return the hosts with fewer cores than busy threads, or with a quota that holds ranks back."""
        for node, sample in state.nodes.items():
            kept = self._samples.setdefault(node, deque(maxlen=limit.CORE_WAIT_SAMPLES))
            if not sample.ranks or (kept and kept[-1] is sample):  # at the end all ranks are gone
                continue
            if not any(state.ranks[each.rank].steps for each in sample.ranks):
                kept.clear()  # all ranks load torch at once while they start
            kept.append(sample)
            threads = max((state.ranks[each.rank].threads or 0 for each in sample.ranks), default=0)
            alone = len(state.nodes) == 1
            found = _quota_symptom(kept, alone=alone, step=state.step, set_threads=threads)
            if found is None or found.value < found.threshold:
                found = _symptom(kept, alone=alone, step=state.step, set_threads=threads) or found
            self._found[node] = found
        return [symptom for symptom in self._found.values() if symptom is not None]


def throttled_ranks(samples: Iterable[NodeSample]) -> frozenset[int]:
    """Return the ranks that a CPU quota holds back at the moment: what they are late for is no other cause's."""
    ranks = (each for sample in samples for each in sample.ranks)
    return frozenset(each.rank for each in ranks if _throttled_share(each) >= limit.MIN_THROTTLED_SHARE)


def _throttled_share(rank: RankSample) -> float:
    return (rank.cpu_throttled_percent or 0.0) / 100


def _quota_symptom(samples: Sequence[NodeSample], *, alone: bool, step: int, set_threads: int) -> Symptom | None:
    """Return the symptom of a host whose ranks a CPU quota holds back; None while there are too few samples."""
    newest = samples[-1]
    shares: dict[int, list[float]] = {}
    quotas = {each.rank: each.cpu_quota_cores for each in newest.ranks}
    for each in (each for sample in samples for each in sample.ranks if each.rank in quotas):
        shares.setdefault(each.rank, []).append(_throttled_share(each))
    medians = {rank: median(each) for rank, each in shares.items() if len(each) >= limit.CORE_WAIT_SAMPLES}
    if not medians:
        return None
    worst = max(medians, key=medians.__getitem__)
    share = medians[worst]
    held = [rank for rank, each in medians.items() if each >= limit.MIN_THROTTLED_SHARE] or [worst]
    cores = [quota for rank in held if (quota := quotas[rank]) is not None]
    if not cores or share < limit.CLEAR_SHARE * limit.MIN_THROTTLED_SHARE:
        return None
    least = min(cores)
    number = f"{least:g}" if least == max(cores) else f"{least:g} to {max(cores):g}"
    who = f"rank {worst}" if len(held) == 1 else f"{len(held)} ranks"
    fewer = ", or start fewer ranks or threads there" if len(held) > 1 or set_threads != 1 else ""
    return Symptom(
        kind="cpu_contention",
        rank=None if alone else min(quotas),
        host=newest.host,
        value=share,
        threshold=limit.MIN_THROTTLED_SHARE,
        confirmed=sum(each >= share / 2 for each in shares[worst]) >= limit.MIN_AGREEING_SHARE * len(samples),
        severity="critical" if share >= limit.CRITICAL_CORE_WAIT_SHARE else "warning",
        cause="cpu_quota",
        step=step,
        message=f"a cpu quota of {number} core{'s' * (number != '1')} holds {who} on {newest.host} back "
        f"{percent(share)} of the time",
        evidence={"throttled_share": share, "quota_cores": least, "ranks": float(len(held))},
        advice=ADVICE["cpu_quota"] + fewer,
    )


def _symptom(samples: Sequence[NodeSample], *, alone: bool, step: int, set_threads: int) -> Symptom | None:
    """Return the symptom of a host; None where its cores suffice, or are not known.

    ``set_threads`` is the most threads on which torch computes in a rank; 0 where they are not known.
    """
    known = [each for each in samples if any(rank.wait_percent is not None for rank in each.ranks)]
    newest = samples[-1]
    if len(known) < limit.CORE_WAIT_SAMPLES or not newest.cores:
        return None
    cores, ranks = newest.cores, len(newest.ranks)
    # A thread that the quota holds back counts as waiting, too: that is none of the other threads' doing.
    waits = [
        median([(rank.wait_percent or 0.0) / 100 - _throttled_share(rank) for rank in each.ranks]) for each in known
    ]
    owns = [sum(map(_busy_threads, each.ranks)) for each in known]
    own = median(owns)
    others = median([(each.other_cpu_percent or 0.0) / 100 for each in known])
    who = f"the {ranks} ranks on {newest.host} wait" if ranks > 1 else f"the rank on {newest.host} waits"
    if ranks >= limit.CROWDED_RATIO * cores:  # their main threads wait for each other rather than for a core
        of_threads = [1.0 - cores / max(busy + others, cores) for busy in owns]
        if median(of_threads) > median(waits):
            waits, who = of_threads, f"the busy threads of the {ranks} ranks on {newest.host} wait"
    share = median(waits)
    if share < limit.CLEAR_SHARE * limit.MIN_CORE_WAIT_SHARE or own + others < limit.MIN_THREAD_EXCESS * cores:
        return None
    taken = others >= limit.MIN_OTHERS_SHARE * cores
    used = f"{cores} core{'s' * (cores != 1)}"
    busy = f"{own + others:.1f} threads are busy on {used}"
    if taken:
        busy = f"{own:.1f} threads of the ranks are busy, and other processes use {others:.1f} of {used}"
    threads = max(1, int((cores - others if taken else cores) / ranks))
    is_set = 0 < set_threads <= threads
    counts = [rank.children for each in known for rank in each.ranks if rank.children is not None]
    workers = max(counts, default=None)  # counted only while a rank waits for a core
    remedies = _remedies(ranks, cores, own / ranks, None if is_set else threads, taken=taken, workers=workers)
    kept_from = cores < (newest.machine_cores or 0)  # other cores of the machine, by a mask that the quota is not
    in_cpuset = kept_from and newest.cpuset_cores == cores
    of_machine = ""
    if kept_from:
        whose = "the cpuset of its cgroup" if in_cpuset else "its CPU affinity"
        of_machine = f" of {newest.machine_cores}, all that {whose} allows"
        remedies.append(ADVICE["cpuset" if in_cpuset else "cpu_affinity"])
    return Symptom(
        kind="cpu_contention",
        rank=None if alone else min(rank.rank for rank in newest.ranks),
        host=newest.host,
        value=share,
        threshold=limit.MIN_CORE_WAIT_SHARE,
        confirmed=sum(each >= share / 2 for each in waits) >= limit.MIN_AGREEING_SHARE * len(waits),
        severity="info" if not remedies else "critical" if share >= limit.CRITICAL_CORE_WAIT_SHARE else "warning",
        cause="cpuset" if in_cpuset else "cpu_affinity" if kept_from else "core_wait",
        step=step,
        message=f"{who} {percent(share)} of the time for a free core: {busy}{of_machine}",
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
    other processes take a good part of the cores. ``workers`` are a rank's child processes; None where they were not
    counted.
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
