"""Decides when a silent host is lost: by its silence and by the steps of the others, never by one of them alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gputrain_tui.diagnosis.stall import RankActivity
from gputrain_tui.state import RunState


def lost_nodes(
    state: RunState, activity: RankActivity, now: float, silent_s: Mapping[int, float], *, timeout_s: float
) -> list[int]:
    """Return the nodes whose hosts are lost, ascending.

    A host is lost if nothing has come from it for the time-out, and the ranks of the hosts that answer have made no
    step for half of it and for two of their longest steps: they wait for its ranks. Where they make steps, its ranks do
    as well, and only the connection is cut. Where no host answers, it is this machine that is cut off.

    Args:
        state: the run.
        activity: the ranks' progress.
        now: time, on the clock of ``activity``.
        silent_s: node to the seconds since the last message of its host, 0 for this machine.
        timeout_s: ``cluster.host_timeout``.
    """
    silent = [node for node, seconds in sorted(silent_s.items()) if seconds >= timeout_s]
    heard = _ranks(state, [node for node, seconds in silent_s.items() if seconds < timeout_s / 2])
    stepped_at = max((activity.progressed_at[rank] for rank in heard if rank in activity.progressed_at), default=None)
    if not silent or stepped_at is None:
        return []
    longest_s = state.longest_stay_s.get("training", 0.0)
    return silent if now - stepped_at >= max(timeout_s / 2, 2 * longest_s) else []


def _ranks(state: RunState, nodes: Collection[int]) -> list[int]:
    return [view.rank for view in state.ranks.values() if view.node in nodes]
