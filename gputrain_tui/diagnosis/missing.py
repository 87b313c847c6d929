"""Finds the lost rank when all failures only report a lost peer."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.diagnosis.stall import awaited_ranks
from gputrain_tui.state import RankView, RunState
from trainer.contract.record import Failure


def lost_peer(state: RunState) -> Failure | None:
    """Return the failure of the rank that others have lost; None if no rank or every rank lost a peer.

    That is a rank with a stall finding, else one that had exited before, else one without a report.
    """
    lost = [
        (view.failure.time, view.failure)
        for view in state.ranks.values()
        if view.state == "failed" and view.failure is not None and view.failure.kind == "lost_peer"
    ]
    if not lost:
        return None
    _, first = min(lost, key=lambda entry: entry[0])
    gave_up = f"rank {first.rank} gave up: {first.message}"
    for finding in state.findings.values():
        if finding.kind == "stalled" and finding.rank is not None:
            kind = "left_early" if finding.cause == "left" else "stalled"
            return _failure(state.ranks[finding.rank], kind, f"{finding.message}; {gave_up}", finding.time)
    exited = [v for v in state.ranks.values() if v.state == "finished" and (v.time or 0.0) <= first.time]
    if exited:
        earliest = min(exited, key=lambda view: view.time or 0.0)
        reason = f"{_names(exited)} had exited with code 0{_after(earliest)} while others were still training"
        return _failure(earliest, "left_early", f"{reason}; {gave_up}", earliest.time or first.time)
    silent = [view for view in state.ranks.values() if view.state not in ("finished", "failed")]
    if not silent:
        return None
    silent = [view for view in awaited_ranks(state) if view in silent] or silent
    return _failure(silent[0], "silent", f"{_names(silent)} reported nothing{_after(silent[0])}; {gave_up}", first.time)


def _failure(view: RankView, kind: str, message: str, time: float) -> Failure:
    step = None if view.awaits_first_step else view.step
    return Failure(time=time, kind=kind, rank=view.rank, host=view.host, step=step, message=message)


def _names(views: Sequence[RankView]) -> str:
    return f"rank{'s' * (len(views) > 1)} {', '.join(str(view.rank) for view in views)}"


def _after(view: RankView) -> str:
    return "" if view.awaits_first_step else f" after step {view.step}"
