"""Ranks that wait for another one in their forward pass, and so look slow in its place.

With ``broadcast_buffers`` (DDP's own default) buffers are copied along a tree of ranks before each forward pass.
Whoever is late for that lengthens the forward pass of its neighbours there, who then are as late for the gradients as
itself. Measured with gloo and two to four ranks: 30 ms before the forward pass of rank 0 lengthen that of all others by
31 ms, those of rank 1 that of rank 0, and of four ranks also that of rank 3. No rank measures the copy, but it leaves a
trace: a follower's forward pass is longer by just what it began earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gputrain_tui.diagnosis.row import CycleRow, base_ms
from gputrain_tui.diagnosis.statistics import median
from gputrain_tui.diagnosis.symptom import Symptom

LEAST_LEAD = 0.05
"""Share of a step by which one rank must begin its forward pass later than the first one."""
TOLERANCE = 0.20
"""Share of that by which a follower's longer forward pass may differ from it, median over the steps."""
AGREEING = 0.75
"""Share of the steps in which it must be longer by half of it at least."""


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """Who waits for whom before the forward pass."""

    leader: int
    """Index of the rank that the others wait for."""
    followers: frozenset[int]
    """Indices of those that wait."""
    wait_ms: float
    """What the usual follower waits per step."""

    @classmethod
    def seen_in(cls, rows: Sequence[CycleRow]) -> Broadcast | None:
        """Return who waits for whom over some steps; None where nobody does, or where it cannot be told."""
        begins = [median(series) for series in zip(*(row.before_forward for row in rows), strict=True)]
        leader = max(range(len(begins)), key=begins.__getitem__)
        if begins[leader] - min(begins) < LEAST_LEAD * base_ms(rows):
            return None
        others = (index for index in range(len(begins)) if index != leader)
        followers = frozenset(index for index in others if _follows(rows, index, leader))
        if not followers:
            return None
        wait_ms = median([begins[leader] - begins[index] for index in followers])
        return cls(leader=leader, followers=followers, wait_ms=wait_ms)

    def told(self, symptom: Symptom, ranks: Sequence[int]) -> Symptom:
        """Return the leader's symptom with who waits for it, and where."""
        waiting = sorted(ranks[index] for index in self.followers)
        who = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting):,} ranks wait"
        return replace(
            symptom,
            message=f"{symptom.message}; {who} for it at the start of the forward pass, as for buffers that DDP "
            "broadcasts there",
            evidence={**symptom.evidence, "followers": float(len(waiting)), "forward_wait_ms": self.wait_ms},
        )


def _follows(rows: Sequence[CycleRow], index: int, leader: int) -> bool:
    """Tell whether a rank's forward pass is longer than the leader's by just what it began earlier."""
    leads = [row.before_forward[leader] - row.before_forward[index] for row in rows]
    longer = [row.cycles[index].forward - row.cycles[leader].forward for row in rows]
    usual = median(leads)
    apart = median([long - lead for long, lead in zip(longer, leads, strict=True)])
    if usual <= 0.0 or abs(apart) > TOLERANCE * usual:
        return False
    return sum(long >= usual / 2 for long in longer) >= AGREEING * len(rows)
