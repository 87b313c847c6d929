"""Tells the time before the first step apart: where the ranks' code stays, or what a task loads."""

from __future__ import annotations

from gputrain_tui.state.run_state import RunState
from gputrain_tui.tables import ranks_text


def start_activity(state: RunState) -> str:
    """Return what the ranks do before their first step, such as ``at train.py:9 in load``; empty where not known."""
    at: dict[str, list[int]] = {}
    for view in state.ranks.values():
        at.setdefault(getattr(view.process, "line", ""), []).append(view.rank)
    if len(at) == 1 and (line := next(iter(at))):
        return f"at {line}"
    at.pop("", None)
    if at:
        most = sorted(at.items(), key=lambda item: -len(item[1]))[:2]
        return ", ".join(f"{ranks_text(ranks, limit=3)} at {line}" for line, ranks in most)
    is_loading = any(view.state == "ready" for view in state.ranks.values())
    return "loading data and model" if is_loading else ""
