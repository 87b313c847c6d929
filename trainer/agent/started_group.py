"""Pure: which processes of a script are ranks of the run, by the process groups that they have joined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from trainer.contract.record.numbers import Count, Rank, WorldSize


class GroupMember(msgspec.Struct, kw_only=True):
    """What a process tells the node agent once it has joined a process group."""

    plan_pid: Count
    """Process of the script, started by the node agent, from which it descends."""
    rank: Rank
    world_size: WorldSize
    local_rank: Count | None = None
    """By ``LOCAL_RANK`` of a launcher in the script."""


class Place(msgspec.Struct, kw_only=True):
    """The node agent's answer."""

    is_rank: bool
    """Whether the process is a rank; the other fields have meaning only then."""
    local_rank: Count = 0
    local_world_size: Count = 0
    node: Rank = 0
    host: str = ""
    device: str = ""
    run_dir: str = ""
    log: str = ""
    """Log of the script's process, to which the process prints if nothing else takes its output."""
    agent_pid: Count = 0


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """The plan of a node whose script may start ranks."""

    world_size: int
    ranks: Sequence[int]
    """Ranks of this node."""
    processes: int
    """Number of processes of the script on this node."""

    @property
    def is_whole(self) -> bool:
        """Whether this node is the only one."""
        return len(self.ranks) == self.world_size


Verdict = Literal["rank", "helper", "nested", "elsewhere"]
"""``helper``: it does not belong to the training of the run. ``nested``: several processes of the script start ranks
each. ``elsewhere``: a rank that the plan has on another node."""


def verdict(
    planned: PlannedRanks,
    member: GroupMember,
    *,
    plan_rank: int,
    own_group: tuple[int, int] | None,
    trains: bool,
    living: Collection[int],
    living_world_size: int,
) -> Verdict:
    """Return whether a process that has joined a group is a rank of the run.

    Args:
        planned: the plan of the node.
        member: the process.
        plan_rank: the rank that the script's process has by the plan.
        own_group: rank and world size of the group that this process has joined itself; None for none.
        trains: whether this process trains itself.
        living: ranks that processes of the script have already.
        living_world_size: world size of their group.
    """
    if own_group is not None:
        # Some launchers start the other ranks from the first one.
        if own_group[1] != member.world_size or member.world_size == 1 or planned.processes > 1:
            return "helper"
    elif trains:
        return "helper"
    taken = {*living, own_group[0]} if own_group is not None else living
    if member.rank in taken or (living and member.world_size != living_world_size):
        return "helper"
    if planned.processes > 1:
        if (member.rank, member.world_size) == (plan_rank, planned.world_size):
            return "rank"  # the script is a wrapper
        return "nested" if member.world_size > 1 else "helper"
    if planned.is_whole:
        return "rank"
    return "rank" if member.world_size == planned.world_size and member.rank in planned.ranks else "elsewhere"
