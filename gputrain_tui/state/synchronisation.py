"""Lateness and transfer times, from the ranks' waits for each other.

Each wait is measured by one clock, so that clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gputrain_tui.state.rank import RankView

OPEN_STEPS = 64
"""Steps kept while some rank has not reported its wait."""


class Lateness:
    """Lateness of each rank: how much later than the first one it was ready to synchronise.

    An all-reduce ends everywhere at about the same moment, so ``late_r = max_k E_k - E_r`` of the exposed waits E needs
    no common clock. Steps with an event of their own are compared one by one; where events cover several steps, the
    means of the windows are compared.
    """

    def __init__(self) -> None:
        self.open_steps: dict[int, dict[int, float]] = {}
        """Exposed wait per rank, ms, of the steps that not all ranks have reported."""

    def note(self, step: int, rank: int, exposed_ms: float, views: Mapping[int, RankView], world_size: int) -> None:
        """Record a rank's exposed wait; when all ranks have reported the step, add the lateness of each to its view."""
        waits = self.open_steps.get(step)
        if waits is None:
            if len(self.open_steps) >= OPEN_STEPS:
                del self.open_steps[next(iter(self.open_steps))]
            waits = self.open_steps[step] = {}
        waits[rank] = exposed_ms
        if len(waits) == world_size > 1:
            del self.open_steps[step]
            longest = max(waits.values())
            for r, wait in waits.items():
                views[r].lateness.append(longest - wait)

    def reset(self) -> None:
        """Drop all open steps, as after a restart."""
        self.open_steps.clear()

    def of(self, views: Mapping[int, RankView]) -> dict[int, float]:
        """Return the mean lateness per rank over recent steps, ms; empty where it is not known."""
        reporting = {rank: view for rank, view in views.items() if view.last is not None}
        if reporting and all(view.lateness for view in reporting.values()):
            return {rank: view.late_ms or 0.0 for rank, view in reporting.items()}
        waits = {r: wait for r, view in views.items() if (wait := view.recent.mean_exposed_ms) is not None}
        if len(waits) < 2:
            return {}
        longest = max(waits.values())
        return {rank: longest - wait for rank, wait in waits.items()}


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
    the last, and the sum of all buckets' bare transfers.
    """
    known = [view for view in views if view.bucket_step is not None]
    steps = [view.bucket_step for view in known if view.bucket_step is not None]
    wire = wire_ms(known, world_size)
    if not wire or steps[0].sync_bytes is None:
        return None
    spans = [step.sync_ms for step in steps if step.sync_ms is not None]
    t_ms = min([sum(wire), *spans])
    return steps[0].sync_bytes / (t_ms / 1e3) * 2 * (world_size - 1) / world_size if t_ms > 0 else None
