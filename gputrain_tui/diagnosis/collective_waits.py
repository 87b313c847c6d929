"""Reads in which collectives ranks stand still, and finds those that have called another one than their group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.state import RankView
from gputrain_tui.state.process_groups import ProcessGroup
from gputrain_tui.tables import ranks_text
from trainer.contract.record import Collective, RankStacks

WAITING_PARTS = ("sync", "group")
"""Parts in which a rank waits for others."""
OF_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")
"""Operations whose inputs have the same size on all ranks."""
WHOLE_GROUPS = ("", "default_pg")
"""torch's descriptions of the group of all ranks."""


class Mismatch(NamedTuple):
    """Ranks of a group that have called another collective than the rest of it."""

    ranks: list[int]
    """The fewer; of two equal parts the one without the first rank."""
    text: str
    """Who has called what."""


def waits(view: RankView) -> bool:
    """Whether a rank has last told that it waits for others."""
    return view.doing is not None and view.doing.part in WAITING_PARTS


def waiting_text(views: Iterable[RankView], awaited: RankView) -> str:
    """Return who waits for a rank in which collective, as the end of a sentence; empty where that is not known."""
    waiting: dict[str, list[int]] = {}
    for view in views:
        call = _call(view)
        if call is not None and view is not awaited and awaited.rank in view.groups.group(call[1]).ranks:
            waiting.setdefault(f"{call[0]} of {call[1]}", []).append(view.rank)
    return "".join(
        f"; {ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} in {collective}" for collective, ranks in waiting.items()
    )


def with_mismatch(
    symptoms: list[Symptom], views: Sequence[RankView], stacks: Mapping[int, RankStacks]
) -> list[Symptom]:
    """Return the symptoms of a stall, or the one of ranks that have called another collective than their group."""
    found = mismatch(views, stacks)
    if found is None:
        return symptoms
    first = next((symptom for symptom in symptoms if symptom.rank in found.ranks), symptoms[0])
    since = first.message.partition("; ")[0]
    return [
        replace(
            first,
            rank=found.ranks[0],
            ranks=found.ranks if len(found.ranks) > 1 else [],
            cause="collectives",
            message=f"{since}; {found.text}",
            advice=ADVICE["collectives"],
        )
    ]


def mismatch(views: Sequence[RankView], stacks: Mapping[int, RankStacks]) -> Mismatch | None:
    """Return the ranks of a group that have called another collective than the rest of it; None without any.

    Where all ranks of a group wait in it, in unlike operations, they wait for good. torch's own record, in the answers
    to a request for stacks, also has the number of each call and the sizes.
    """
    by_rank = {view.rank: view for view in views}
    for group in _groups(views):
        calls = {rank: _call(by_rank[rank]) for rank in group.ranks if rank in by_rank}
        inside = {rank: call[0] for rank, call in calls.items() if call is not None and call[1] == group.name}
        if len(inside) == len(group.ranks) and (
            found := _different(inside, inside, f" of {group.name}", "waits in", "wait in")
        ):
            return found
    for name, members in _recorded_groups(views):
        last = {rank: stacks[rank].collectives for rank in members if rank in stacks and rank in by_rank}
        if found := _of_record({rank: each for rank, each in last.items() if each}, name):
            return found
    return None


def _call(view: RankView) -> tuple[str, str] | None:
    """Return operation and group of the collective that a rank waits in; None where that is not known."""
    if view.doing is None or not view.doing.waits_in:
        return None
    operation, _, group = view.doing.waits_in.partition(" of ")
    return operation, group


def _recorded_groups(views: Sequence[RankView]) -> list[tuple[str, tuple[int, ...]]]:
    """Return torch's descriptions of groups with their ranks, as far as they are known."""
    named = [(f"mesh_{group.name}", group.ranks) for group in _groups(views)]
    return [*((name, tuple(view.rank for view in views)) for name in WHOLE_GROUPS), *named]


def _groups(views: Iterable[RankView]) -> Iterable[ProcessGroup]:
    return dict.fromkeys(group for view in views for group in view.groups.by_name.values() if len(group.ranks) > 1)


def _of_record(last: Mapping[int, Sequence[Collective]], name: str) -> Mismatch | None:
    """Return the mismatch in torch's record of a group: calls of the same number that are not the same."""
    calls: dict[int, dict[int, Collective]] = {}
    for rank, each in last.items():
        for call in each:
            if call.group == name and call.name not in ("send", "recv"):
                calls.setdefault(call.number, {})[rank] = call
    for number in sorted(calls):
        of_ranks = calls[number]
        keys = {
            rank: (call.name, str(call.sizes) if call.name in OF_EQUAL_SIZES else "") for rank, call in of_ranks.items()
        }
        if found := _different(
            keys, {rank: call.text for rank, call in of_ranks.items()}, "", "has called", "have called"
        ):
            return found
    return None


def _different(
    keys: Mapping[int, Hashable], texts: Mapping[int, str], end: str, verb: str, verb_of_many: str
) -> Mismatch | None:
    """Return the ranks whose key is not that of the most; None where all are equal."""
    counts = Counter(keys.values())
    if len(counts) < 2:
        return None
    first = keys[min(keys)]
    usual = max(counts, key=lambda key: (counts[key], key == first))
    odd = sorted(rank for rank in keys if keys[rank] != usual)
    others = sorted(rank for rank in keys if keys[rank] == usual)
    who_and_what = [
        f"{ranks_text(ranks)} {verb if len(ranks) == 1 else verb_of_many} {texts[ranks[0]]}{end}"
        for ranks in (odd, others)
    ]
    return Mismatch(odd, ", ".join(who_and_what))
