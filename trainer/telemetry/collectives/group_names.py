"""Names of a rank's process groups, as the record has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch.distributed as dist

from trainer.contract.record.collective_groups import MAX_GROUPS, OTHER_GROUPS

LONGEST_NAME = 60
"""Characters of a group's name."""


@dataclass(frozen=True)
class NamedGroup:
    """A process group of this rank."""

    name: str
    ranks: Sequence[int]
    """Ascending; empty for ``OTHER_GROUPS``."""
    backend: str = ""


class GroupNames:
    """Process groups in the order of their first collective; groups of equal name and ranks are one."""

    def __init__(self) -> None:
        self.named: list[NamedGroup] = []
        """Grows only, so that other threads may read it up to an index they know."""
        self._indices: dict[int, tuple[ref[Any], int | None]] = {}
        """Index in ``named`` by the address of the process group, which a later group may have again."""

    def index(self, group: Any) -> int | None:
        """Return the index of a process group in ``named``; None for a group of one, which waits for nobody."""
        known = self._indices.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        index = self._add(group)
        self._indices[id(group)] = ref(group), index
        return index

    def _add(self, group: Any) -> int | None:
        if group.size() < 2:
            return None
        # A group that torch does not know, such as one of its C++ interface, has no ranks to tell.
        ranks = dist.get_process_group_ranks(group) if group in dist.distributed_c10d._world.pg_map else []
        if not ranks:
            return self._other()
        ranks = sorted(ranks)
        world = dist.get_world_size()
        name = name_of(str(group.group_name), str(group.group_desc), whole=len(ranks) == world)[:LONGEST_NAME]
        taken = {each.name: index for index, each in enumerate(self.named)}
        numbered, number = name, 1
        while numbered in taken:
            if self.named[taken[numbered]].ranks == ranks:
                return taken[numbered]
            number += 1
            numbered = f"{name} ({number})"
        if len(taken) - (OTHER_GROUPS in taken) >= MAX_GROUPS:
            return self._other()
        self.named.append(NamedGroup(numbered, ranks, str(dist.get_backend(group))))
        return len(self.named) - 1

    def _other(self) -> int:
        for index, each in enumerate(self.named):
            if each.name == OTHER_GROUPS:
                return index
        self.named.append(NamedGroup(OTHER_GROUPS, []))
        return len(self.named) - 1


def name_of(group_name: str, description: str, *, whole: bool) -> str:
    """Return the name of a group by torch's name and description of it; ``whole`` if all ranks are in it."""
    # DeviceMesh describes its groups as ``mesh_tp``, or ``mesh_dim_0`` where the dimension has no name.
    dimension = description.removeprefix("mesh_")
    if dimension not in ("", "undefined", "default_pg", "default", OTHER_GROUPS):
        return dimension
    if whole:
        return "world"
    # Equal on all ranks of the group: torch counts the groups that all ranks make, and others it names by a hash.
    return f"group {group_name if group_name.isdecimal() else group_name[:6]}"
