"""Decides when a silent host is lost: by its silence, the steps of the others and its ranks' heartbeats to them."""

from __future__ import annotations

from collections.abc import Mapping

from gputrain_tui.diagnosis.rank_activity import RankActivity
from gputrain_tui.diagnosis.thresholds import LOST_TOGETHER_S
from gputrain_tui.state import RunState


def lost_nodes(
    state: RunState, activity: RankActivity, now: float, silent_s: Mapping[int, float], *, timeout_s: float
) -> list[int]:
    """Return the nodes whose hosts are lost, ascending.

    A host is lost if nothing has come from it for the time-out, and the ranks of the hosts that answer have made no
    step for half of it and for two of their longest steps: they wait for its ranks. Where they make steps, its ranks do
    as well, and only the connection is cut; likewise where they get the heartbeats of its ranks, as during a long
    validation. Where no host answers, it is this machine that is cut off. Hosts that answer again count from the last
    of them on: their record follows, and others may need longer.

    Args:
        state: the run.
        activity: the ranks' progress.
        now: time, on the clock of ``activity``.
        silent_s: node to the seconds since the last message of its host, 0 for this machine.
        timeout_s: ``cluster.host_timeout``.
    """
    longest_s = max(silent_s.values(), default=0.0)
    if longest_s < timeout_s:
        return []
    least_s = min(timeout_s, longest_s - LOST_TOGETHER_S)
    silent = [node for node, seconds in sorted(silent_s.items()) if seconds >= least_s]
    noted = [state.ranks[rank].node for kind, rank in state.findings if kind == "host_silent" and rank in state.ranks]
    answers = [node for node, seconds in silent_s.items() if seconds < timeout_s / 2 and node not in noted]
    heard = [view for view in state.ranks.values() if view.node in answers]
    stepped_at = [activity.progressed_at[view.rank] for view in heard if view.rank in activity.progressed_at]
    if not stepped_at:
        return []
    waited_s = now - max(*stepped_at, state.silence_ended_at)
    if waited_s < max(timeout_s / 2, 2 * state.longest_stay_s.get("training", 0.0)):
        return []
    unheard = [view.unheard for view in heard if view.unheard is not None]
    beats = {view.node for view in state.ranks.values() if unheard and not any(view.rank in ranks for ranks in unheard)}
    return [node for node in silent if node not in beats]
