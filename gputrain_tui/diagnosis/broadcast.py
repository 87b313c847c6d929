"""Detects ranks that wait for another one in their forward pass, and so seem slow in its place.

With ``broadcast_buffers`` (DDP's own default) buffers are copied along a tree of ranks before each forward pass. A rank
that is late for the copy lengthens the forward pass of its neighbours in the tree, which then are as late for the
gradients as itself. Measured with gloo and two to four ranks: 30 ms before the forward pass of rank 0 lengthen that of
all others by 31 ms; 30 ms of rank 1 lengthen that of rank 0, and with four ranks also that of rank 3. No rank measures
the copy, but it leaves a trace: a follower's forward pass is longer by as much as it began earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.row import StepRow, base_ms
from gputrain_tui.diagnosis.symptom import Symptom


@dataclass(frozen=True, kw_only=True)
class BroadcastWait:
    """Ranks that wait for a leader in their forward pass."""

    leader: int
    """Index of the rank that the others wait for."""
    followers: frozenset[int]
    """Indices of the ranks that wait."""
    wait_ms: float

    @classmethod
    def detect(cls, rows: Sequence[StepRow]) -> BroadcastWait | None:
        """Return the leader and its followers over some steps; None where there are none."""
        begins = [median(series) for series in zip(*(row.before_forward for row in rows), strict=True)]
        leader = max(range(len(begins)), key=begins.__getitem__)
        if begins[leader] - min(begins) < limit.MIN_LEAD_SHARE * base_ms(rows):
            return None
        others = (index for index in range(len(begins)) if index != leader)
        followers = frozenset(index for index in others if _follows(rows, index, leader))
        if not followers:
            return None
        wait_ms = median([begins[leader] - begins[index] for index in followers])
        return cls(leader=leader, followers=followers, wait_ms=wait_ms)

    def explain(self, symptom: Symptom, ranks: Sequence[int]) -> Symptom:
        """Return the leader's symptom with its followers in message and evidence."""
        waiting = sorted(ranks[index] for index in self.followers)
        who = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting):,} ranks wait"
        return replace(
            symptom,
            message=f"{symptom.message}; {who} for it at the start of the forward pass, where DDP broadcasts buffers",
            evidence={**symptom.evidence, "followers": float(len(waiting)), "forward_wait_ms": self.wait_ms},
        )


def _follows(rows: Sequence[StepRow], index: int, leader: int) -> bool:
    """Whether a rank's forward pass is longer than the leader's by as much as it began earlier."""
    leads = [row.before_forward[leader] - row.before_forward[index] for row in rows]
    longer = [row.phases[index].forward - row.phases[leader].forward for row in rows]
    usual = median(leads)
    apart = median([long - lead for long, lead in zip(longer, leads, strict=True)])
    if usual <= 0.0 or abs(apart) > limit.MAX_LEAD_DEVIATION_SHARE * usual:
        return False
    return sum(long >= usual / 2 for long in longer) >= limit.MIN_AGREEING_SHARE * len(rows)
