"""Process groups of a rank, and the collectives of its last steps in each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest

from trainer.contract.record import MAX_GROUPS, CollectiveCall, CollectiveGroup, GroupSync, Step

POINT_TO_POINT = frozenset({"send", "recv", "send_object_list", "recv_object_list"})
"""Operations between two ranks: who waits least is not the last of its group to arrive."""


CALLS_SPAN = 1000
"""Steps for which the single calls of a slow one are shown."""


@dataclass(frozen=True)
class ProcessGroup:
    """A process group; equal for all of its ranks."""

    name: str
    ranks: tuple[int, ...]
    """Ascending; empty where they are not known."""
    point_to_point: bool = field(default=False, compare=False)
    """Of waits in it, whether they are all for single ranks, as in a pipeline."""

    def __hash__(self) -> int:
        """Return a hash of a few ranks, as a group may have thousands."""
        return hash((self.name, self.ranks[:2], len(self.ranks)))


@lru_cache(maxsize=4096)
def _group(name: str, ranks: tuple[int, ...], *, point_to_point: bool = False) -> ProcessGroup:
    """Return the same object for equal groups, which makes comparing them quick."""
    return ProcessGroup(name, ranks, point_to_point)


@dataclass(slots=True, eq=False)
class RankGroups:
    """Process groups of one rank, and its last step events with collectives in them."""

    window: int
    """Step events that are kept."""
    by_name: dict[str, ProcessGroup] = field(default_factory=dict)
    recent: deque[Step] = field(init=False)
    detailed: deque[Step] = field(default_factory=lambda: deque(maxlen=4))
    """The newest step events with single calls."""
    slowest: Step | None = None
    """The one with the longest step among those of the last ``CALLS_SPAN`` steps."""

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.window)

    def add(self, event: CollectiveGroup) -> None:
        if len(self.by_name) > MAX_GROUPS and event.name not in self.by_name:
            return  # more than a rank tells apart, with ``OTHER_GROUPS``: the record is damaged
        self.by_name[event.name] = _group(event.name, tuple(event.ranks))

    def note(self, event: Step) -> None:
        self.recent.append(event)
        if event.calls:
            self.detailed.append(event)
            before = self.slowest
            if before is None or event.step - before.step > CALLS_SPAN or _step_ms(event) >= _step_ms(before):
                self.slowest = event

    def clear(self) -> None:
        """Forget all of them: the rank has been started anew."""
        self.by_name.clear()
        self.recent.clear()
        self.detailed.clear()
        self.slowest = None

    def group(self, name: str) -> ProcessGroup:
        """Return the group of a name; one whose ranks are not known where the record lacks it."""
        return self.by_name.get(name) or _group(name, ())

    @property
    def recent_steps(self) -> int:
        """Steps that the kept events cover."""
        return sum(event.steps for event in self.recent)

    def waits(self, event: Step) -> dict[ProcessGroup, float]:
        """Return the exposed time in each group in an event's steps, mean ms, where it was measured."""
        return {self._waited_in(sync): sync.exposed_ms for sync in event.groups or () if sync.exposed_ms is not None}

    def _waited_in(self, sync: GroupSync) -> ProcessGroup:
        group = self.group(sync.group)
        if sync.operations and POINT_TO_POINT.issuperset(sync.operations):
            return _group(group.name, group.ranks, point_to_point=True)
        return group


def transfers(waits: Sequence[Mapping[ProcessGroup, float]]) -> dict[ProcessGroup, float]:
    """Return the bare transfer in each group, ms, from each rank's waits: the last to arrive waits for no other.

    It is left out where not all ranks of the group have told their wait, and where they wait for single ranks only.
    """
    by_group: dict[ProcessGroup, list[float]] = {}
    for each in waits:
        for group, wait in each.items():
            by_group.setdefault(group, []).append(wait)
    return {
        group: min(each)
        for group, each in by_group.items()
        if 1 < len(group.ranks) == len(each) and not group.point_to_point
    }


def least_transfer_ms(waits: Sequence[Mapping[ProcessGroup, float]]) -> float:
    """Return the least time that a rank waits for bare transfers, ms, from each rank's waits by group.

    A rank may be last in one group and wait in another, so that the least sum of waits over all ranks is more.
    """
    bare = transfers(waits)
    return min((sum(bare.get(group, 0.0) for group in each) for each in waits), default=0.0)


def least_transfer_of_calls_ms(ranks: Mapping[int, RankGroups]) -> float | None:
    """Return ``least_transfer_ms`` of single calls, in each of which another rank may be last; None if not known.

    Known if all ranks have recorded those of the same step and, in each group, have made the same calls in it.
    """
    of_ranks_steps = [{step.step for step in groups.detailed} for groups in ranks.values()]
    common = set.intersection(*of_ranks_steps) if of_ranks_steps else None
    if not common:
        return None
    # The others may be recorded for being slow.
    first = min((each for each in next(iter(ranks.values())).detailed if each.step in common), key=_step_ms)
    steps = {rank: next(each for each in of.detailed if each.step == first.step) for rank, of in ranks.items()}
    calls: dict[ProcessGroup, dict[int, list[CollectiveCall]]] = {}
    for rank, step in steps.items():
        recorded = step.calls or []
        if sum(sync.calls for sync in step.groups or ()) > len(recorded) + 1:
            return None  # only the first calls of a step with very many are recorded
        for call in recorded:
            if call.operation not in POINT_TO_POINT:
                calls.setdefault(ranks[rank].group(call.group), {}).setdefault(rank, []).append(call)
    bare: dict[ProcessGroup, float] = {}
    for group, of_ranks in calls.items():
        if not 1 < len(group.ranks) == len(of_ranks):
            return None
        bare[group] = 0.0
        for same in zip_longest(*of_ranks.values()):
            if None in same or len({call.operation for call in same}) != 1:
                return None
            bare[group] += min(call.exposed_ms for call in same)
    return min(sum(bare[group] for group, of in calls.items() if rank in of) for rank in ranks)


def _step_ms(event: Step) -> float:
    return event.step_ms or 0.0


def _distinct(groups: Iterable[ProcessGroup]) -> Iterator[ProcessGroup]:
    seen: set[ProcessGroup] = set()
    for group in groups:
        if group not in seen:
            seen.add(group)
            yield group


def parts_by_name(groups: Iterable[ProcessGroup], world_size: int) -> dict[str, list[ProcessGroup]]:
    """Return the groups of several but not all ranks by name, such as ``tp``, of which each replica has its own."""
    parts: dict[str, list[ProcessGroup]] = {}
    for group in _distinct(groups):
        if 1 < len(group.ranks) < world_size:
            parts.setdefault(group.name, []).append(group)
    return parts


def connected(groups: Iterable[ProcessGroup], ranks: Iterable[int]) -> list[frozenset[int]]:
    """Return the sets of ranks that wait for each other, directly or through others, by the groups that they share.

    A rank without a group is alone.
    """
    of: dict[int, set[int]] = {rank: {rank} for rank in ranks}
    for group in _distinct(groups):
        joined: set[int] = set()
        for rank in group.ranks:
            if rank in of and rank not in joined:
                joined |= of[rank]
        for rank in joined:
            of[rank] = joined
        if len(joined) == len(of):
            break
    return [frozenset(each) for each in {id(each): each for each in of.values()}.values()]
