"""Ranks from which no step comes any more: who is behind, since when, and what the machine sees of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom, who
from gputrain_tui.state import RankView, RunState

LEAST_S = 10.0
"""A machine may pause this long for reasons of its own: a slow disk, a suspended guest."""
INTERVALS = 20.0
"""How many usual steps the silence must last."""
LONGEST = 4.0
"""How many times the longest step of late."""
TOGETHER_S = 20.0
"""Least silence when no rank is behind: a script that is watched may evaluate between two steps."""
BUSY_S = 300.0
"""The same while all processes are busy."""
BUSY_PERCENT = 50.0
"""From how much of a core on a process is computing, or waiting actively."""


PLACES = {
    "data": "between two steps or waiting for data",
    "h2d": "copying a batch to its device",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "sync": "waiting for the others' gradients",
    "optimizer": "in its optimizer step",
    "other": "between two steps",
}


@dataclass
class Heard:
    """When each rank was last heard of, by this process's clock: those of the nodes may differ."""

    steps: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)

    def listen(self, state: RunState, now: float) -> None:
        """Note who has done a step, or entered another state, since the last time."""
        for rank, view in state.ranks.items():
            news = (view.step, view.state)
            if self.steps.get(rank) != news:
                self.steps[rank], self.times[rank] = news, now


def stalls(state: RunState, heard: Heard, now: float) -> list[Symptom]:
    """Return who keeps the run from going on.

    Args:
        state: the run.
        heard: who was heard of when.
        now: seconds on the clock of ``heard``.
    """
    training = [view for view in state.ranks.values() if view.state == "training" and view.last is not None]
    if not training or len(training) < len(state.ranks):
        return []  # one that starts, validates, saves or has ended takes its time
    silences = {view.rank: now - heard.times.get(view.rank, now) for view in training}
    if min(silences.values()) < LEAST_S / 2:
        return []
    usual_s, longest_s = _pace(training)
    patience_s = max(LEAST_S, INTERVALS * usual_s, LONGEST * longest_s)
    ahead = max(view.step for view in training)
    behind = [view for view in training if view.step < ahead]
    shortest = min(silences.values())
    if shortest < patience_s / 2:
        return []
    if not behind or len(behind) > len(training) / 2:
        one = _furthest_behind(training)
        if one is None:
            busy = all(_doing(view) == "busy" for view in training)
            patience_s = max(patience_s, BUSY_S if busy else TOGETHER_S)
        return [_together(training, one, shortest, patience_s, usual_s)]
    return [_one(state, view, silences[view.rank], patience_s, usual_s, ahead) for view in behind]


def _pace(views: list[RankView]) -> tuple[float, float]:
    """Return the usual and the longest duration of a step of late, seconds."""
    durations = [event.step_ms * event.steps for view in views for event in view.steps if event.step_ms is not None]
    return (median(durations) / 1e3, max(durations) / 1e3) if durations else (0.0, 0.0)


def _one(state: RunState, view: RankView, silence_s: float, patience_s: float, usual_s: float, ahead: int) -> Symptom:
    host, _ = who(state, view.rank)
    where = f" on {host}" if host else ""
    return Symptom(
        kind="stalled",
        rank=view.rank,
        value=silence_s,
        threshold=patience_s,
        severity="critical",
        cause=_part(view) or _doing(view),
        step=view.step,
        message=f"rank {view.rank}{where} has done no step for {silence_s:.0f} s, after step {view.step}, and the "
        f"others wait at step {ahead}; {_said(view)}",
        evidence=_evidence(view, silence_s, usual_s),
        advice=ADVICE["stalled_behind"],
    )


def _together(
    views: list[RankView], behind: RankView | None, silence_s: float, patience_s: float, usual_s: float
) -> Symptom:
    step = min(view.step for view in views)
    one = behind or _odd_one(views)
    if behind is not None:
        who_else = f": {_said(behind)}, and the others wait for it"
    else:
        who_else = f"; {_said(one)}, unlike the others" if one is not None else ""
    return Symptom(
        kind="stalled",
        rank=one.rank if one is not None else None,
        value=silence_s,
        threshold=patience_s,
        severity="critical",
        cause=_part(one or views[0]) or _doing(one or views[0]),
        step=step,
        message=f"no rank has done a step for {silence_s:.0f} s, after step {step}{who_else}",
        evidence=_evidence(one or views[0], silence_s, usual_s),
        advice=ADVICE["stalled_together" if one is None else "stalled_behind"],
    )


def _furthest_behind(views: list[RankView]) -> RankView | None:
    """Return the one rank that is at an earlier part of the step than those that wait for it, as the ranks tell."""
    if any(view.doing is None or view.doing.step <= view.step for view in views):
        return None
    places = {view.rank: view.doing.parts_done for view in views if view.doing is not None}
    behind = [view for view in views if places[view.rank] < max(places.values())]
    return min(behind, key=lambda view: places[view.rank]) if 0 < len(behind) <= len(views) / 2 else None


def _odd_one(views: list[RankView]) -> RankView | None:
    """Return the one rank that does something else than those that wait for it, where that can be told."""
    kinds: dict[str | None, list[RankView]] = {}
    for view in views:
        kinds.setdefault(_doing(view), []).append(view)
    if len(kinds) != 2 or None in kinds:
        return None
    # On CPU ranks waiting for the others is idle; on a GPU the driver may wait actively.
    if all(view.device == "cpu" for view in views) and len(kinds["busy"]) == 1:
        return kinds["busy"][0]
    odd = min(kinds.values(), key=len)
    return odd[0] if len(odd) == 1 and len(views) > 2 else None


def _part(view: RankView) -> str | None:
    """Return the part of the step that the rank is at, as it told itself."""
    return view.doing.part if view.doing is not None and view.doing.step > view.step else None


def _doing(view: RankView) -> str | None:
    """Return ``busy`` or ``idle``, as the last look at its process says; None when nobody looked."""
    if view.process is None or view.process.cpu_percent is None:
        return None
    return "busy" if view.process.cpu_percent >= BUSY_PERCENT else "idle"


def _said(view: RankView) -> str:
    part, doing = _part(view), _doing(view)
    where = PLACES[part] if part is not None else "no one knows where"
    how = {"busy": ", and its process is busy", "idle": ", and its process is idle", None: ""}[doing]
    return f"rank {view.rank} is {where}{how}"


def _evidence(view: RankView, silence_s: float, usual_s: float) -> dict[str, float]:
    evidence = {"silent_s": silence_s, "usual_step_s": usual_s, "last_step": float(view.step)}
    if view.process is not None and view.process.cpu_percent is not None:
        evidence["cpu_percent"] = view.process.cpu_percent
    if view.gpu is not None and view.gpu.utilization_percent is not None:
        evidence["gpu_percent"] = view.gpu.utilization_percent
    return evidence
