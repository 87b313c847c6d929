"""Lateness and transfer times, from the ranks' waits for each other.

Each wait is measured by one clock, so that clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import nan

from gputrain_tui.state.process_groups import connected
from gputrain_tui.state.rank_state import RankView
from trainer.contract.record import Finding


def late_ms(waits: Sequence[float], sets: Sequence[Collection[int]] = ()) -> list[float]:
    """Return how much later than the first rank each one was ready to synchronise, ms, from the ranks' waits.

    An all-reduce ends everywhere at about the same moment, so the rank that waits longest was ready first:
    ``late_r = max_k E_k - E_r`` of the waits E, at one step or of their means over several. It is of ranks that wait
    for each other, directly or through others: their steps end together, so that a rank's waits of all kinds are what
    is left of a step beside its own work.

    Args:
        waits: Of each rank; NaN: not measured.
        sets: Indices of those that wait for each other; none where all do.
    """
    if len(sets) < 2:
        longest = max((wait for wait in waits if wait == wait), default=0.0)
        return [longest - wait for wait in waits]
    late = [nan] * len(waits)
    for members in sets:
        known = [index for index in members if index < len(waits)]
        for index, late_by in zip(known, late_ms([waits[index] for index in known]), strict=True):
            late[index] = late_by
    return late


def lateness(
    views: Collection[RankView], sets: Sequence[Collection[int]], findings: Iterable[Finding] = ()
) -> dict[int, float]:
    """Return the lateness by rank: the mean delay after the first rank to be ready to synchronise, ms.

    ``sets``: ranks that wait for each other. Empty where fewer than two waits are known.

    If others wait for a straggler in their forward pass already, they are as late as it for the synchronisation,
    and its lateness is the one that was found.
    """
    waits = {view.rank: wait for view in views if (wait := view.sums.mean_exposed_ms) is not None}
    if len(waits) < 2:
        return {}
    of_ranks = late_ms([waits.get(rank, nan) for rank in range(max(waits) + 1)], sets)
    late = {rank: of_ranks[rank] for rank in waits}
    for finding in findings:
        if finding.kind == "straggler" and finding.rank in late and "followers" in finding.evidence:
            late[finding.rank] = max(late[finding.rank], finding.evidence["forward_wait_ms"])
    return late


def latest(late: Mapping[int, float], findings: Iterable[tuple[str, int | None]]) -> tuple[int, float] | None:
    """Return the rank that the others wait for most, the straggler where one is found, and its lateness in ms.

    ``late``: lateness by rank; ``findings``: kinds and ranks of the findings that stand. None for fewer than two ranks.
    """
    if len(late) < 2:
        return None
    stragglers = [rank for kind, rank in findings if kind == "straggler" and rank is not None and rank in late]
    rank = max(stragglers or late, key=lambda r: (late[r], -r))
    return rank, late[rank]


def synchronised(views: Collection[RankView]) -> list[frozenset[int]]:
    """Return the sets of ranks that wait for each other; all ranks where their groups are not known, or DDP is used."""
    if any(view.bucket_step is not None or not view.groups.by_name for view in views):
        return [frozenset(view.rank for view in views)]
    groups = (group for view in views for group in view.groups.by_name.values())
    return connected(groups, (view.rank for view in views))


def wire_ms(views: Iterable[RankView], world_size: int) -> list[float]:
    """Return the bare transfer time of each gradient bucket, ms: the last rank to arrive waits for no other.

    Empty until every rank has reported the times of the same buckets.
    """
    times = [view.bucket_step.bucket_ms for view in views if view.bucket_step is not None]
    known_times = [times_of_rank for times_of_rank in times if times_of_rank is not None]
    if len(known_times) < 2 or len(known_times) < world_size or len({len(each) for each in known_times}) != 1:
        return []
    return [min(each) for each in zip(*known_times, strict=True)]


def bus_bytes_per_s(views: Iterable[RankView], world_size: int) -> float | None:
    """Return a lower bound of the slowest link's bandwidth while gradients are reduced: ``S / t * 2 (n - 1) / n``.

    S is the size of the gradients. t is the shorter of two upper bounds: the last rank's time from its first bucket to
    the last, and the sum of all buckets' bare transfers. None where a rank is in a smaller group, too: it is not
    known which one reduces the gradients.
    """
    views = list(views)
    if any(len(group.ranks) not in (1, world_size) for view in views for group in view.groups.by_name.values()):
        return None
    known = [view for view in views if view.bucket_step is not None]
    steps = [view.bucket_step for view in known if view.bucket_step is not None]
    wire = wire_ms(known, world_size)
    if not wire or steps[0].sync_bytes is None:
        return None
    spans = [step.sync_ms for step in steps if step.sync_ms is not None]
    t_ms = min([sum(wire), *spans])
    bucket_bytes = steps[0].sync_bytes - sum(group.bytes for group in steps[0].groups or ())
    return bucket_bytes / (t_ms / 1e3) * 2 * (world_size - 1) / world_size if t_ms > 0 else None
