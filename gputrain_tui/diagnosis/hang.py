"""Decides when a stalled rank is taken to hang for good, so that the run is ended by ``cluster.on_stall``."""

from __future__ import annotations

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.rank_activity import RankActivity
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.rank_stacks import group_stacks
from trainer.contract.record import Failure

DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/", "/rpdb")
"""Parts of the paths of debuggers' files, which are on the stack of a rank that waits for a person."""


def hang(
    state: RunState, activity: RankActivity, now: float, *, timeout_s: float | None, limit_s: float
) -> Failure | None:
    """Return the failure of the rank that hangs; None if none does yet.

    A rank hangs if it is stalled, the others wait for it, and it has made no progress for the time-out. A learned
    time-out also asks that its processes did nothing: a rank that computes goes on. It is not learned for a rank that
    saves, which slow storage may keep waiting. A rank in which a debugger waits for a person does not hang. Where none
    is known to be the one that others wait for, the run hangs if no rank has done anything for a given time-out.

    Args:
        state: the run.
        activity: the ranks' progress and activity.
        now: time, on the clock of ``activity``.
        timeout_s: ``cluster.stall_timeout``; None learns it from the longest stay of a rank in the same stage.
        limit_s: time-out of the collectives: the limit of a learned one, and its value where nothing was learned.
    """
    for (kind, _), finding in state.findings.items():
        view = None if finding.rank is None else state.ranks.get(finding.rank)
        if kind != "stalled" or view is None or finding.cause == "left" or _is_debugged(state, view):
            continue
        if view.awaits_start:
            continue  # the finding is about a process of the attempt before
        silence_s = activity.silence_s(view, now, since=state.silence_ended_at)
        if timeout_s is None:
            longest_s = None if view.stage == "saving" else state.longest_stay_s.get(view.stage)
            learned_s = limit_s if longest_s is None else max(limit.MIN_HANG_S, limit.HANG_MULTIPLE * longest_s)
            if min(silence_s, now - activity.active_at.get(view.rank, now)) < min(learned_s, limit_s):
                continue
        elif silence_s < timeout_s:
            continue
        held = ", as all processes there are held" if activity.record.is_held(view.node, now) else ""
        return Failure(
            time=now,
            kind="stalled",
            rank=view.rank,
            host=view.host,
            step=None if view.awaits_first_step else view.step,
            message=f"{_where(state, view)}{held}; the others waited {int(silence_s)} s for it",
        )
    return None if timeout_s is None else _common_hang(state, activity, now, timeout_s)


def _common_hang(state: RunState, activity: RankActivity, now: float, timeout_s: float) -> Failure | None:
    finding = state.findings.get(("stalled", None))
    running = [view for view in state.ranks.values() if view.state not in ("finished", "failed")]
    if finding is None or any(view.awaits_start or _is_debugged(state, view) for view in running):
        return None
    idle_s = [
        min(activity.silence_s(view, now, since=state.silence_ended_at), now - activity.active_at.get(view.rank, now))
        for view in running
    ]
    if min(idle_s, default=0.0) < timeout_s:
        return None
    return Failure(time=now, kind="stalled", message=finding.message)


def _where(state: RunState, view: RankView) -> str:
    answer = state.stacks.get(view.rank)
    (group,) = group_stacks([answer]) if answer is not None else (None,)
    line = (group.line or group.problem) if group is not None else ""
    line = line or (view.doing.line if view.doing is not None else "")
    host = f" on {view.host}" if view.host else ""
    after = f" after step {view.attempt_step}" if view.attempt_step else ""
    return f"rank {view.rank}{host} hangs{after}" + (f": {line}" if line else "")


def _is_debugged(state: RunState, view: RankView) -> bool:
    if view.process is not None and view.process.held == "t":
        return True
    answer = state.stacks.get(view.rank)
    files = [frame.file for thread in answer.threads[:1] for frame in thread.frames] if answer is not None else []
    return any(part in file for part in DEBUGGERS for file in files)
