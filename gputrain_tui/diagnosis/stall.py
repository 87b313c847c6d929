"""Finds ranks from which no step comes any more: who is behind, since when, and what their process does.

Every state of a rank has a usual length: the longest stay in it so far, of any rank. A rank that stays several times
as long is stalled where the others are known to wait for it, and the whole run where nobody goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom, who
from gputrain_tui.state import RankView, RunState

LEAST_S = 10.0
"""A machine may pause this long for reasons of its own: a slow disk, a suspended guest."""
LONGEST = 4.0
"""How many times the longest stay in the same state so far."""
INTERVALS = 20.0
"""How many usual steps, of a rank that trains."""
TOGETHER_S = 20.0
"""Least silence when no rank is behind: a script that is watched may evaluate between two steps."""
QUIET_S = 60.0
"""How long a state that no rank has left yet may last without any sign of life."""
BUSY_S = 300.0
"""How long it may last while the processes compute."""
BUSY_PERCENT = 50.0
"""From how much of a core on, waiting for one included, a process is computing, or waiting actively."""
ALIVE_PERCENT = 2.0
"""From how much of a core or a GPU in a second on something goes on; two ticks of the kernel's clock."""

PLACES = {
    "data": "between two steps or waiting for data",
    "h2d": "copying a batch to its device",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "sync": "waiting for the others' gradients",
    "optimizer": "in its optimizer step",
    "other": "between two steps",
    "group": "waiting for the others",
}
STAYS = {
    "spawned": "has been starting",
    "joining": "has been joining",
    "ready": "has been getting ready",
    "first_step": "has done no step",
    "training": "has done no step",
    "validating": "has been validating",
    "saving": "has been saving",
    "group": "has been waiting for the others",
}
"""How a rank that stays in a state is spoken of."""
BEFORE = ("spawned", "joining", "ready")
"""The states before training, in order."""
LOCK = "futex"
"""How the kernel's functions begin in which a thread waits for another one."""
Place = tuple[int, int, int]


@dataclass
class Heard:
    """When each rank was last heard of, by this process's clock: those of the nodes may differ."""

    news: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    """When a rank did a step, or entered another state, last."""
    alive: dict[int, float] = field(default_factory=dict)
    """When it did that, or its process was seen to do anything, last."""
    quiet_s: float = 0.0
    """The longest time in which a process did nothing, and went on."""
    _samples: dict[int, tuple[object, object]] = field(default_factory=dict)

    def listen(self, state: RunState, now: float) -> None:
        """Note who has done a step, or entered another state, since the last time."""
        for rank, view in state.ranks.items():
            news = (view.stage, view.step, view.turns)
            before = self.news.get(rank)
            if before != news:
                self.news[rank], self.times[rank] = news, now
            process, gpu = self._samples.get(rank, (None, None))
            is_sampled = view.process is not process or view.gpu is not gpu
            if before != news or (is_sampled and _is_alive(view)):
                self.quiet_s = max(self.quiet_s, now - self.alive.get(rank, now))
                self.alive[rank] = now
            if is_sampled:
                self._samples[rank] = view.process, view.gpu


def stalls(state: RunState, heard: Heard, now: float) -> list[Symptom]:
    """Return who keeps the run from going on.

    Args:
        state: the run.
        heard: who was heard of when.
        now: seconds on the clock of ``heard``.
    """
    running = [view for view in state.ranks.values() if view.state != "finished"]
    if not running or any(view.state in (None, "failed") for view in running):
        return []
    silences = {view.rank: now - heard.times.get(view.rank, now) for view in running}
    shortest_s = min(silences.values())
    if shortest_s < LEAST_S / 2:
        return []
    ahead = max(view.step for view in running)
    left = [view for view in state.ranks.values() if view.state == "finished"]
    if left:
        # Ranks that have done all steps leave before those that still evaluate or save.
        early = [view for view in left if view.step < ahead]
        patience_s = _patience(state, running)
        if not early or patience_s is None:
            return []
        return [_left(view, shortest_s, patience_s, ahead) for view in early]
    missing = awaited(state)
    if missing:
        found = []
        for view in missing:
            patience_s = _patience(state, [view]) or (BUSY_S if _doing(view) == "busy" else QUIET_S)
            if silences[view.rank] >= patience_s / 2:
                found.append(_one(state, view, silences[view.rank], patience_s, ahead, alone=len(missing) == 1))
        return found
    learnt_s = _patience(state, running)
    if learnt_s is None:
        return _quiet(running, heard, now)
    busy = all(view.stage == "training" and _doing(view) == "busy" for view in running)
    patience_s = max(learnt_s, BUSY_S if busy else TOGETHER_S)
    return [_together(running, _odd_one(running), shortest_s, patience_s)] if shortest_s >= patience_s / 2 else []


def awaited(state: RunState) -> list[RankView]:
    """Return the ranks that have not ended and that others wait for, as all of them tell where they are."""
    running = [view for view in state.ranks.values() if view.state not in ("finished", "failed")]
    if state.joining is not None and all(view.state in ("spawned", "joining") for view in running):
        return [view for view in running if view.rank in state.joining.missing]
    places = {view.rank: _place(view) for view in running}
    ahead = max(places.values(), default=None)
    behind = [view for view in running if places[view.rank] != ahead]
    if 0 < len(behind) <= len(running) / 2:
        return behind
    progress = {view.rank: _progress(view) for view in running}
    told = [view.doing.part for view in running if view.doing is not None]
    if len(told) < len(running) and not {"sync", "group"} & set(told):
        return []
    furthest = max(progress.values(), default=None)
    behind = [view for view in running if progress[view.rank] != furthest]
    return behind if 0 < len(behind) <= len(running) / 2 else []


def _place(view: RankView) -> Place:
    """Return how far a rank is: before training, then by steps, then by validations between two steps."""
    begun = BEFORE.index(view.state) if view.state in BEFORE else len(BEFORE)
    return begun, view.step, view.turns


def _progress(view: RankView) -> tuple[int, float]:
    """Return the step that a rank is in, and how many of its parts it has done; one that waits for all has done them.

    The record of a step that is done may come later than what the rank is doing now.
    """
    if view.doing is None:
        return view.step + 1, -1.0
    return view.doing.step, float("inf") if view.doing.part == "group" else view.doing.parts_done


def _patience(state: RunState, views: Sequence[RankView]) -> float | None:
    """Return how long the ranks may take, by how long others took; None where nothing is known of their state."""
    stays_s = [state.longest_s.get(view.stage) for view in views]
    known_s = [stay_s for stay_s in stays_s if stay_s is not None]
    if len(known_s) < len(stays_s):
        return None
    steps_s = _step_s(views) if any(view.state == "training" for view in views) else []
    steps = max(INTERVALS * median(steps_s), LONGEST * max(steps_s)) if steps_s else 0.0
    return max(LEAST_S, LONGEST * max(known_s), steps)


def _step_s(views: Sequence[RankView]) -> list[float]:
    """Return the durations of the steps of late, seconds."""
    return [event.step_ms * event.steps / 1e3 for view in views for event in view.steps if event.step_ms is not None]


def _quiet(views: Sequence[RankView], heard: Heard, now: float) -> list[Symptom]:
    """Judge ranks that tell nothing of what they do, as those of scripts that are not measured, by their processes."""
    silences = {view.rank: now - heard.alive.get(view.rank, now) for view in views}
    silent = [view for view in views if silences[view.rank] >= QUIET_S / 2]
    seen = all(_doing(view) is not None for view in views)
    patience_s = max(QUIET_S if seen and len(silent) == len(views) else BUSY_S, LONGEST * heard.quiet_s)
    silence_s = min((silences[view.rank] for view in silent), default=0.0)
    alive = [view for view in views if view not in silent]
    if silence_s < patience_s / 2 or len(alive) > len(views) / 2:
        return []
    one = alive[0] if len(alive) == 1 else None if alive else _asleep_elsewhere(views)
    return [_together(views, one, silence_s, patience_s)]


def _one(state: RunState, view: RankView, silence_s: float, patience_s: float, ahead: int, *, alone: bool) -> Symptom:
    host, _ = who(state, view.rank)
    where = f" on {host}" if host else ""
    after = f", after step {view.step}" if view.step else ""
    wait = f"wait at step {ahead}" if view.step < ahead else "wait for it" if alone else "wait for them"
    return Symptom(
        kind="stalled",
        rank=view.rank,
        value=silence_s,
        threshold=patience_s,
        severity="critical",
        cause=_part(view) or _doing(view),
        step=view.step,
        message=f"rank {view.rank}{where} {STAYS[view.stage]} for {silence_s:.0f} s{after}, and the "
        f"others {wait}{_said(view)}",
        evidence=_evidence(view, silence_s),
        advice=ADVICE["stalled_behind"],
    )


def _left(view: RankView, silence_s: float, patience_s: float, ahead: int) -> Symptom:
    return Symptom(
        kind="stalled",
        rank=view.rank,
        value=silence_s,
        threshold=patience_s,
        severity="critical",
        cause="left",
        step=view.step,
        message=f"rank {view.rank} has ended after step {view.step}, and for {silence_s:.0f} s the others have done no "
        f"step, after step {ahead}",
        evidence=_evidence(view, silence_s),
        advice=ADVICE["stalled_left"],
    )


def _together(views: Sequence[RankView], one: RankView | None, silence_s: float, patience_s: float) -> Symptom:
    step = min(view.step for view in views)
    after = f", after step {step}" if step else ""
    stage = views[0].stage
    if any(view.stage != stage for view in views) or stage in ("training", "first_step"):
        message = f"no rank has done a step for {silence_s:.0f} s{after}"
    else:
        message = f"every rank {STAYS[stage]} for {silence_s:.0f} s{after}"
    return Symptom(
        kind="stalled",
        rank=one.rank if one is not None else None,
        value=silence_s,
        threshold=patience_s,
        severity="critical",
        cause=_part(one or views[0]) or _doing(one or views[0]),
        step=step,
        message=message + (f"{_said(one)}, unlike the others" if one is not None else ""),
        evidence=_evidence(one or views[0], silence_s),
        advice=ADVICE["stalled_together" if one is None else "stalled_behind"],
    )


def _asleep_elsewhere(views: Sequence[RankView]) -> RankView | None:
    """Return the one rank whose process sleeps elsewhere than those of all others, which sleep at a lock.

    A collective of gloo is waited for at a lock of its threads.
    """
    places = {view.rank: getattr(view.process, "sleeps_in", None) or "" for view in views}
    odd = [view for view in views if not places[view.rank].startswith(LOCK)]
    return odd[0] if len(odd) == 1 < len(views) and places[odd[0].rank] else None


def _odd_one(views: Sequence[RankView]) -> RankView | None:
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
    """Return the phase of the step that the rank is at, as it told itself."""
    return view.doing.part if view.doing is not None else None


def _doing(view: RankView) -> str | None:
    """Return ``busy`` or ``idle``, as the last look at its process says; None when nobody looked.

    A process that is ready to compute and has no core is not idle.
    """
    if view.process is None or view.process.cpu_percent is None:
        return None
    return "busy" if view.process.cpu_percent + (view.process.wait_percent or 0.0) >= BUSY_PERCENT else "idle"


def _is_alive(view: RankView) -> bool:
    """Return whether the last look at its process, or its GPU, saw it do anything."""
    used = 0.0
    if view.process is not None:
        used = (view.process.cpu_percent or 0.0) + (view.process.wait_percent or 0.0)
    if view.gpu is not None:
        used = max(used, view.gpu.utilization_percent or 0.0)
    return used >= ALIVE_PERCENT


def _said(view: RankView) -> str:
    """Return where a rank is and what its process does, to go on a sentence with; empty where neither is known."""
    phase, doing = _part(view), _doing(view)
    told = [f"rank {view.rank} is {PLACES[phase]}"] if phase is not None else []
    if doing is not None:
        place = view.process.sleeps_in
        what = f"sleeps in the kernel's {place}" if place and not place.startswith(LOCK) else f"is {doing}"
        told.append(f"its process {what}" if told else f"the process of rank {view.rank} {what}")
    return "; " + ", and ".join(told) if told else ""


def _evidence(view: RankView, silence_s: float) -> dict[str, float]:
    evidence = {"silent_s": silence_s, "last_step": float(view.step)}
    if steps_s := _step_s([view]):
        evidence["usual_step_s"] = median(steps_s)
    if view.process is not None and view.process.cpu_percent is not None:
        evidence["cpu_percent"] = view.process.cpu_percent
    if view.process is not None and view.process.wait_percent is not None:
        evidence["core_wait_percent"] = view.process.wait_percent
    if view.gpu is not None and view.gpu.utilization_percent is not None:
        evidence["gpu_percent"] = view.gpu.utilization_percent
    return evidence
