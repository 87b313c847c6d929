"""Separates the rank that failed from those that ended because of it."""

from __future__ import annotations

from trainer.contract.record import Failure, RunEnded

LOST_PEER = "lost peer"
"""It failed because another rank was gone."""
STOPPED = "stopped"
"""It was ended because another one failed, or with the run."""
RANK_OUTCOMES = (LOST_PEER, STOPPED)


def rank_outcome(
    rank: int, state: str | None, failure: Failure | None, cause: Failure | None, ended: RunEnded | None
) -> str | None:
    """Return how a rank ended because of another one or the run; None for every other rank.

    Args:
        rank: the rank.
        state: its last state.
        failure: its failure, as it or its node agent reported it.
        cause: root cause of the run's failure.
        ended: how the run ended.
    """
    if state == "failed":
        if cause is None or cause.rank == rank:
            return None
        kind = failure.kind if failure is not None else "stopped"
        if kind in ("lost_peer", "join_timeout"):
            return LOST_PEER
        return STOPPED if kind in ("signal", "exit", "stopped") else None
    over = ended is not None and ended.status != "finished"
    return STOPPED if over and state not in (None, "finished") else None
