"""Rolls up the stragglers of one node or process group into one finding: the record keeps one for each rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from gputrain_tui.diagnosis.symptom import percent
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.finding_text import by_urgency
from gputrain_tui.tables import ranks_text
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import Event, Finding

AnyFinding = TypeVar("AnyFinding", bound=Event)


def roll_up(events: Iterable[AnyFinding], ranks: Mapping[int, RankView]) -> list[AnyFinding]:
    """Return the events with the stragglers of a node or group merged into one finding, in the place of the first."""
    return [event for event, _ in roll_up_with_members(events, ranks)]


def roll_up_with_members(
    events: Iterable[AnyFinding], ranks: Mapping[int, RankView]
) -> list[tuple[AnyFinding, Sequence[Finding]]]:
    """Return the events of ``roll_up``, each with the findings that are merged in it; none for an unmerged event.

    A merged finding is that of the rank that is latest, with the number of ranks as the evidence ``ranks``. Stragglers
    with different causes are not merged, nor those of a run on one node or of a node with at least half of its ranks
    in time, nor those of a process group with a rank in time.
    """
    listed = list(events)
    nodes = {rank: view.node for rank, view in ranks.items() if view.node is not None}
    sizes = Counter(nodes.values())
    groups: dict[tuple[int, str | None, str], list[Finding]] = defaultdict(list)
    if len(sizes) > 1:
        for event in listed:
            if isinstance(event, Finding) and event.kind == "straggler" and event.rank in nodes:
                groups[nodes[event.rank], event.cause, event.state].append(event)
    merged: dict[int, tuple[Any, Sequence[Finding]]] = {}
    for (node, *_), group in groups.items():
        if len(group) > max(1, sizes[node] / 2):
            merged |= dict.fromkeys(map(id, group), (_of_node(group), group))
    left = [
        each for each in listed if isinstance(each, Finding) and each.kind == "straggler" and id(each) not in merged
    ]
    for name, group in _of_groups(left, ranks):
        if not any(id(finding) in merged for finding in group):
            merged |= dict.fromkeys(map(id, group), (_of_group(name, group), group))
    pairs = (merged.get(id(event), (event, ())) for event in listed)
    return list({id(event): (event, members) for event, members in pairs}.values())


def newest_findings(state: RunState) -> list[tuple[Finding, bool]]:
    """Return each finding as it was last raised, rolled up, and whether it is still raised.

    Those come first, by urgency; then those that are over, in the order in which they were raised.
    """
    return [(finding, stands) for finding, stands, _ in newest_findings_with_members(state)]


def newest_findings_with_members(state: RunState) -> list[tuple[Finding, bool, Sequence[Finding]]]:
    """Return the entries of ``newest_findings``, each with the findings that are merged in it."""
    newest: dict[tuple[str, int | None], Finding] = {}
    for finding in state.past_findings:
        if finding.state == "raised":
            newest.pop((finding.kind, finding.rank), None)
            newest[finding.kind, finding.rank] = finding
    entries: list[tuple[Finding, bool, Sequence[Finding]]] = []
    for stands in (True, False):
        listed = [finding for key, finding in newest.items() if (key in state.findings) == stands]
        if stands:
            listed.sort(key=by_urgency)
        entries += [(finding, stands, members) for finding, members in roll_up_with_members(listed, state.ranks)]
    return entries


def marking_findings(state: RunState) -> list[Finding]:
    """Return the findings that mark a run, rolled up: those that stand, and the ``past_lasting`` ones."""
    past = [finding for finding, _ in past_lasting(state)]
    return roll_up([*state.findings.values(), *past], state.ranks)


def past_lasting(state: RunState) -> list[tuple[Finding, int]]:
    """Return the findings by comparison of the ranks that are over but stood for most steps, and for how many steps.

    Each is as it was last raised, but cleared, with the step at which it was. The one that stood longest comes first.
    """
    stood: Counter[tuple[str, int | None]] = Counter()
    first: dict[tuple[str, int | None], int] = {}
    newest: dict[tuple[str, int | None], Finding] = {}
    for event in state.past_findings:
        key = event.kind, event.rank
        if event.kind == RESTARTED:  # the steps of an attempt before may have been made again
            stood.clear()
            first.clear()
        elif event.step is None or not event.diagnosed:
            continue
        elif event.state == "raised":
            first.setdefault(key, event.step)
            newest[key] = event
        elif key in first:
            stood[key] += event.step - first.pop(key)
            newest[key] = replace(newest[key], state="cleared", step=event.step)
    made = state.step - (state.plan.first_update if state.plan is not None else 0)
    over = [key for key, steps in stood.most_common() if steps > made / 2 and key not in state.findings]
    return [(newest[key], stood[key]) for key in over]


def _of_groups(findings: Iterable[Finding], ranks: Mapping[int, RankView]) -> Iterator[tuple[str, list[Finding]]]:
    """Yield each process group, smaller than the world, whose ranks are all late for the same reason."""
    late: dict[tuple[str | None, str], dict[int, Finding]] = defaultdict(dict)
    for finding in findings:
        if finding.rank is not None:
            late[finding.cause, finding.state][finding.rank] = finding
    members = {rank for of_ranks in late.values() for rank in of_ranks if len(of_ranks) > 1}
    views = [ranks[rank] for rank in sorted(members) if rank in ranks]
    for group in dict.fromkeys(group for view in views for group in view.groups.by_name.values()):
        for of_ranks in late.values():
            if 1 < len(group.ranks) < len(ranks) and all(rank in of_ranks for rank in group.ranks):
                yield group.name, [of_ranks[rank] for rank in group.ranks]


def _of_group(name: str, group: list[Finding]) -> Finding:
    members = [finding.rank for finding in group if finding.rank is not None]
    merged = _merged(group, f"{ranks_text(members)} ({name})")
    return replace(merged, ranks=members, message=merged.message.partition("; ")[0])


def _of_node(group: list[Finding]) -> Finding:
    latest = _latest(group)
    return replace(_merged(group, f"{len(group):,} ranks of {latest.host or 'a node'}"), device=None)


def _latest(group: list[Finding]) -> Finding:
    return max(group, key=lambda finding: finding.evidence.get("excess_ms", 0.0))


def _merged(group: list[Finding], who: str) -> Finding:
    latest = _latest(group)
    known_ms = [finding.evidence["excess_ms"] for finding in group if "excess_ms" in finding.evidence]
    longer = f"{min(known_ms):.1f} to {max(known_ms):.1f} ms longer" if known_ms else "longer"
    share = latest.evidence.get("excess_share")
    of_step = f" (up to {percent(share)} of a step)" if share is not None else ""
    because = latest.message.partition(" of a step), ")[2].replace(" its ", " their ")
    text = f"{who} take {longer} than the others in each step{of_step}, {because}"
    return replace(latest, message=text, evidence={**latest.evidence, "ranks": float(len(group))})
