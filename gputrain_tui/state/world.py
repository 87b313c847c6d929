"""Pure: the world of a run, the ranks of its newest attempt, and those that only attempts before it had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gputrain_tui.state.rank_state import RankView
from trainer.contract.record import Finding, NodeSample
from trainer.contract.record.unrecorded import RECORD_INCOMPLETE

Views = dict[int, RankView]
"""Views of ranks, by rank, ascending."""


def divided(ranks: Views, former: Views, world_size: int) -> tuple[Views, Views]:
    """Return the ranks of a new world and those that it does not have; a former rank that is back keeps its totals."""
    known = sorted({**former, **ranks}.items())
    return (
        {rank: view for rank, view in known if rank < world_size},
        {rank: view for rank, view in known if rank >= world_size},
    )


def still_standing(findings: Iterable[Finding], former: Mapping[int, object]) -> list[Finding]:
    """Return the findings without those about former ranks; gaps of the record stay."""
    return [
        finding
        for finding in findings
        if finding.kind == RECORD_INCOMPLETE
        or not former.keys() & {*finding.ranks, *([] if finding.rank is None else [finding.rank])}
    ]


def samples_of_attempt(
    nodes: Mapping[int, NodeSample], former: Mapping[int, object], began: float
) -> dict[int, NodeSample]:
    """Return the newest samples of nodes that an attempt has; a record that is read as a whole has them before it."""
    return {node: sample for node, sample in nodes.items() if sample.time >= began and not is_of_former(sample, former)}


def is_of_former(sample: NodeSample, former: Mapping[int, object]) -> bool:
    """Whether a node's sample is of an attempt before: it has a rank that is gone."""
    return any(process.rank in former for process in sample.ranks)
