"""Detects stalled ranks: those behind the others, the time since their progress, and their processes' activity.

The usual length of a stage is the longest stay of any rank in it so far. A rank that stays several times as long is
stalled if the others wait for it; the run is stalled if no rank makes progress.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

from msgspec.structs import replace

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.collective_waits import waiting_text, waits, with_mismatch
from gputrain_tui.diagnosis.rank_activity import RankActivity, busy_or_idle
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.state import RankView, RunState

PHASE_TEXT = {
    "data": "waiting for data",
    "h2d": "copying a batch to its device",
    "batch": "between its batch and its forward pass",
    "loss": "between its batch and its backward pass",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "sync": "waiting for the others' gradients",
    "gradients": "between its backward pass and its optimizer step",
    "optimizer": "in its optimizer step",
    "other": "between two steps",
    "group": "waiting for the others",
    "compile": "compiling",
    "threads": "waiting for threads of its script, whose code has ended",
}
STAGE_TEXT = {
    "spawned": "has been starting",
    "joining": "has been joining",
    "ready": "has been getting ready",
    "first_step": "has done no step",
    "training": "has done no step",
    "validating": "has been validating",
    "saving": "has been saving",
    "group": "has been waiting for the others",
    "compile": "has been compiling",
    "threads": "has waited for threads of its script, whose code has ended,",
}
START_STAGES = ("spawned", "joining", "ready")
LOCK_PREFIX = "futex"
"""Prefix of the kernel functions in which a thread waits for a lock."""


def stalls(state: RunState, activity: RankActivity, now: float, *, timeout_s: float | None = None) -> list[Symptom]:
    """Return the stalled ranks, or the stall of the whole run; ``now`` is on the clock of ``activity``.

    A rank that others wait for is stalled after ``timeout_s`` at the latest, if it has begun to train.
    """
    running = [view for view in state.ranks.values() if view.state != "finished"]
    if not running or any(view.state in (None, "failed") for view in running):
        return []
    if any(kind == "host_silent" for kind, _ in state.findings):
        return []  # the progress of its ranks is unknown, and the others wait for them
    symptoms: list[Symptom] = []
    for ranks in state.synchronised():
        views = [view for rank, view in state.ranks.items() if rank in ranks]
        found = _stalls_among(state, views, activity, now, timeout_s)
        symptoms += with_mismatch(found, views, state.stacks) if found else []
    return symptoms


def _stalls_among(
    state: RunState, views: Sequence[RankView], activity: RankActivity, now: float, timeout_s: float | None
) -> list[Symptom]:
    """Return the stalls of ranks that wait for each other."""
    running = [view for view in views if view.state != "finished"]
    # What is known of a rank that this attempt has not started yet is that of the attempt before.
    if not running or any(view.awaits_start for view in running):
        return []
    # Events that a silent host has held back arrive late: time counts from the end of the silence.
    silences = {view.rank: activity.silence_s(view, now, since=state.silence_ended_at) for view in running}
    if stopped := [view for view in running if _is_stopped(view) and silences[view.rank] >= limit.MIN_STOPPED_S]:
        return [_stopped_symptom(view, silences[view.rank]) for view in stopped]
    shortest_s = min(silences.values())
    if shortest_s < limit.MIN_STALL_S / 2:
        return []
    if any(view.stage == "compile" and activity.works(view, now) for view in running):
        return []  # a compilation may take longer than all steps, and the others wait for it
    ahead = max(view.attempt_step for view in running)
    left_behind = _left_behind(views, activity)
    running = [view for view in running if view.rank not in left_behind]
    finished = [view for view in views if view.state == "finished"]
    meet = all(kind != "no_process_group" for kind, _ in state.findings)  # else no rank waits for another
    if finished and meet:
        if not ahead and not any(activity.works(view, now) for view in running):
            # Before any step, as where the process group is made.
            return [_left_symptom(view, shortest_s, limit.MIN_COMMON_STALL_S, ahead) for view in finished]
        # Ranks that have done all steps end before those that still evaluate or save.
        early = [view for view in finished if view.attempt_step < ahead and view.rank not in left_behind]
        threshold_s = _stall_threshold_s(state, running)
        return [] if threshold_s is None else [_left_symptom(view, shortest_s, threshold_s, ahead) for view in early]
    others = set(state.ranks) - {view.rank for view in views}
    missing = awaited_ranks(state, exclude=left_behind | others) if meet else []
    if missing:
        symptoms = []
        for view in missing:
            silent_s, threshold_s = silences[view.rank], _missing_threshold_s(state, view, activity, now, timeout_s)
            if silent_s >= threshold_s / 2:
                held = activity.record.is_held(view.node, now)
                symptom = _behind_symptom(view, silent_s, threshold_s, ahead, alone=len(missing) == 1, held=held)
                symptoms.append(replace(symptom, message=symptom.message + waiting_text(running, view)))
        return symptoms
    # Of ranks that never meet, the first step of one tells nothing about that of another.
    learnt_s = _stall_threshold_s(state, running) if meet or all(view.attempt_step for view in running) else None
    if learnt_s is None:
        return _idle_symptoms(running, activity, now, state.silence_ended_at)
    busy = all(view.stage == "training" and busy_or_idle(view) == "busy" for view in running)
    threshold_s = max(learnt_s, limit.NEW_STAGE_BUSY_S if busy else limit.MIN_COMMON_STALL_S)
    if shortest_s < threshold_s / 2:
        return []
    return [_common_symptom(running, _outlier(running), shortest_s, threshold_s)]


def _missing_threshold_s(
    state: RunState, view: RankView, activity: RankActivity, now: float, timeout_s: float | None
) -> float:
    """Return the stall threshold of a rank that others wait for."""
    threshold_s = _stall_threshold_s(state, [view]) or (
        limit.NEW_STAGE_BUSY_S if busy_or_idle(view) == "busy" else limit.NEW_STAGE_IDLE_S
    )
    if view.stage in (*START_STAGES, "first_step") and activity.works(view, now):
        threshold_s = max(threshold_s, limit.NEW_STAGE_BUSY_S)  # imports and first steps differ between ranks
    if timeout_s is not None and view.stage not in START_STAGES:
        threshold_s = min(threshold_s, timeout_s)
    return threshold_s


def _left_behind(views: Sequence[RankView], activity: RankActivity) -> set[int]:
    """Return the ranks without which another one has trained on for a while, so that no rank waits for them.

    They have run out of data in DDP's ``join()``, or synchronise nothing.
    """
    ranks = [view for view in views if view.rank in activity.progressed_at]
    first = max(ranks, key=lambda view: view.attempt_step, default=None)
    return {
        view.rank
        for view in ranks
        if first is not None
        and first.attempt_step > view.attempt_step + 1  # ranks that synchronise each step lead by at most one
        and activity.progressed_at[first.rank] - activity.progressed_at[view.rank] >= limit.MIN_STALL_S
    }


def awaited_ranks(state: RunState, *, exclude: Collection[int] = ()) -> list[RankView]:
    """Return the running ranks that others wait for, by the reported positions; ``exclude`` has ranks to leave out."""
    running = [
        view for view in state.ranks.values() if view.state not in ("finished", "failed") and view.rank not in exclude
    ]
    if state.joining is not None and all(view.state in ("spawned", "joining") for view in running):
        return [view for view in running if view.rank in state.joining.missing]
    positions = {view.rank: _position(view) for view in running}
    ahead = max(positions.values(), default=None)
    behind = _not_waiting([view for view in running if positions[view.rank] != ahead])
    if 0 < len(behind) <= len(running) / 2:
        return behind
    progress = {view.rank: _progress(view) for view in running}
    known = [view.doing.part for view in running if view.doing is not None]
    if len(known) < len(running) and not {"sync", "group"} & set(known):
        return []
    furthest = max(progress.values(), default=None)
    behind = _not_waiting([view for view in running if progress[view.rank] != furthest])
    return behind if 0 < len(behind) <= len(running) / 2 else []


def _not_waiting(behind: list[RankView]) -> list[RankView]:
    """Return the ranks that do not wait for others; all of them where all wait."""
    return [view for view in behind if not waits(view)] or behind


def _position(view: RankView) -> tuple[int, int, int]:
    """Return a rank's position: its stage before training, then its step, then validations since that step."""
    begun = START_STAGES.index(view.state) if view.state in START_STAGES else len(START_STAGES)
    return begun, view.attempt_step, view.validation_turns


def _progress(view: RankView) -> tuple[int, float]:
    """Return the step that a rank is in and the number of its phases done; infinite while it waits for all ranks.

    The event of a finished step may come later than a report about the next one.
    """
    if view.doing is None:
        return view.attempt_step + 1, -1.0
    return view.doing.step, float("inf") if view.doing.part == "group" else view.doing.parts_done


def _stall_threshold_s(state: RunState, views: Sequence[RankView]) -> float | None:
    """Return the stall threshold of ranks from earlier stays in their stages; None if a stage had none."""
    stays_s = [state.longest_stay_s.get(view.stage) for view in views]
    known_s = [stay_s for stay_s in stays_s if stay_s is not None]
    if len(known_s) < len(stays_s):
        return None
    steps_s = _step_s(views) if any(view.state == "training" for view in views) else []
    steps = max(limit.STEP_MULTIPLE * median(steps_s), limit.STAY_MULTIPLE * max(steps_s)) if steps_s else 0.0
    return max(limit.MIN_STALL_S, limit.STAY_MULTIPLE * max(known_s), steps)


def _step_s(views: Sequence[RankView]) -> list[float]:
    return [event.step_ms * event.steps / 1e3 for view in views for event in view.steps if event.step_ms is not None]


def _idle_symptoms(views: Sequence[RankView], activity: RankActivity, now: float, since: float) -> list[Symptom]:
    """Return the stall of ranks without events, as of scripts that are not measured, by their processes' activity.

    Idle times count from ``since`` at the earliest.
    """
    idle_s = {view.rank: now - max(activity.active_at.get(view.rank, now), since) for view in views}
    idle = [view for view in views if idle_s[view.rank] >= limit.NEW_STAGE_IDLE_S / 2]
    sampled = all(busy_or_idle(view) is not None for view in views)
    threshold_s = max(
        limit.NEW_STAGE_IDLE_S if sampled and len(idle) == len(views) else limit.NEW_STAGE_BUSY_S,
        limit.STAY_MULTIPLE * activity.longest_idle_s,
    )
    shortest_s = min((idle_s[view.rank] for view in idle), default=0.0)
    active = [view for view in views if view not in idle]
    if shortest_s < threshold_s / 2 or len(active) > len(views) / 2:
        return []
    outlier = active[0] if len(active) == 1 else None if active else _sleeping_outlier(views)
    return [_common_symptom(views, outlier, shortest_s, threshold_s, idle=len(idle))]


def _whole_s(seconds: float) -> int:
    """Return whole seconds, rounded down: a finding stands for longer than it says."""
    return int(seconds)


def _behind_symptom(
    view: RankView, silence_s: float, threshold_s: float, ahead: int, *, alone: bool, held: bool
) -> Symptom:
    """Return the stall of a rank that others wait for, ``alone`` or with more; ``held`` with all of its node."""
    where = f" on {view.host}" if view.host else ""
    step = view.attempt_step
    after = f", after step {step}" if step else ""
    wait = f"wait at step {ahead}" if step < ahead else "wait for it" if alone else "wait for them"
    # Its own part ends where the others wait: a line of the user's code is on the way there.
    doing = view.doing if view.stage == "group" and not held else None
    on_the_way = doing is not None and not doing.waits_in and bool(_line(view))
    stage = f"has been at {_line(view)}" if on_the_way else STAGE_TEXT[view.stage]
    message = f"rank {view.rank}{where} {stage} for more than {_whole_s(silence_s)} s{after}, and the others {wait}"
    if on_the_way:
        symptom = _stall(view, silence_s, threshold_s, message, ADVICE["stalled_behind"])
        return replace(symptom, cause=busy_or_idle(view))
    if held:
        message += "; its node agent does not run either: all processes there are held"
        return replace(_stall(view, silence_s, threshold_s, message, ADVICE["stalled_held"]), cause="stopped")
    return _stall(view, silence_s, threshold_s, message + _position_text(view), ADVICE["stalled_behind"])


def _stopped_symptom(view: RankView, silence_s: float) -> Symptom:
    where = f" on {view.host}" if view.host else ""
    silence = f"for more than {_whole_s(silence_s)} s"
    message = f"rank {view.rank}{where} {STAGE_TEXT[view.stage]} {silence}{_position_text(view)}"
    advice = (
        f"`kill -CONT {view.pid}`{where} continues it" if view.pid else f"send SIGCONT to its process{where}"
    ) + "; Ctrl-Z, kill -STOP or a debugger has stopped it"
    return replace(_stall(view, silence_s, limit.MIN_STOPPED_S, message, advice), cause="stopped")


def _left_symptom(view: RankView, silence_s: float, threshold_s: float, ahead: int) -> Symptom:
    after = f"after step {view.attempt_step}" if view.attempt_step else "before its first step"
    at = f", after step {ahead}" if ahead else ""
    message = (
        f"rank {view.rank} has ended {after}, and the others have done no step for more than "
        f"{_whole_s(silence_s)} s{at}"
    )
    advice = ADVICE["stalled_left" if ahead else "stalled_left_at_once"]
    return replace(_stall(view, silence_s, threshold_s, message, advice), cause="left")


def _common_symptom(
    views: Sequence[RankView], outlier: RankView | None, silence_s: float, threshold_s: float, *, idle: int = 0
) -> Symptom:
    """Return the stall of all ranks, attributed to the outlier if there is one.

    ``idle``: number of ranks whose processes have done nothing for so long, if that is why they are stalled.
    """
    step = min(view.attempt_step for view in views)
    after = f", after step {step}" if step else ""
    stage = views[0].stage
    if idle and not step and all(view.stage == "first_step" for view in views):
        # Steps of a script may not be seen: what is known is that its processes do nothing.
        who = "every rank has" if idle == len(views) else f"{idle} of {len(views)} ranks have"
        message = f"no step was seen, and {who} done nothing for more than {_whole_s(silence_s)} s"
    elif any(view.stage != stage for view in views) or stage in ("training", "first_step"):
        message = f"no rank has done a step for more than {_whole_s(silence_s)} s{after}"
    else:
        message = f"every rank {STAGE_TEXT[stage]} for more than {_whole_s(silence_s)} s{after}"
    if outlier is None:
        message += _lines_text(views)
        is_ended = all(view.stage == "threads" for view in views)
        advice = ADVICE["stalled_ended" if is_ended else "stalled_together"]
        symptom = _stall(views[0], silence_s, threshold_s, message, advice)
        return replace(symptom, rank=None, step=step, line="")
    message += f"{_position_text(outlier)}, unlike the others"
    return replace(_stall(outlier, silence_s, threshold_s, message, ADVICE["stalled_behind"]), step=step)


def _stall(view: RankView, silence_s: float, threshold_s: float, message: str, advice: str) -> Symptom:
    """Return the symptom of a stall with the position and the activity of one rank."""
    return Symptom(
        kind="stalled",
        rank=view.rank,
        value=silence_s,
        threshold=threshold_s,
        severity="critical",
        cause=_phase(view) or busy_or_idle(view),
        step=view.attempt_step,
        line=view.doing.line if view.doing is not None else "",
        message=message,
        evidence=_evidence(view, silence_s),
        advice=advice,
    )


def _sleeping_outlier(views: Sequence[RankView]) -> RankView | None:
    """Return the rank that sleeps elsewhere in the kernel while all others wait for a lock; None if there is none.

    Ranks in a collective of gloo wait for a lock.
    """
    positions = {view.rank: getattr(view.process, "sleeps_in", None) or "" for view in views}
    odd = [view for view in views if not positions[view.rank].startswith(LOCK_PREFIX)]
    return odd[0] if len(odd) == 1 < len(views) and positions[odd[0].rank] else None


def _outlier(views: Sequence[RankView]) -> RankView | None:
    """Return the only busy rank among idle ones, or the only idle one among busy ones; None if there is none."""
    kinds: dict[str | None, list[RankView]] = {}
    for view in views:
        kinds.setdefault(busy_or_idle(view), []).append(view)
    if len(kinds) != 2 or None in kinds:
        return None
    # On CPU ranks waiting for the others is idle; on a GPU the driver may wait actively.
    if all(view.device == "cpu" for view in views) and len(kinds["busy"]) == 1:
        return kinds["busy"][0]
    odd = min(kinds.values(), key=len)
    return odd[0] if len(odd) == 1 and len(views) > 2 else None


def _phase(view: RankView) -> str | None:
    return view.doing.part if view.doing is not None else None


def _is_stopped(view: RankView) -> bool:
    return view.process is not None and view.process.held == "T"


def _position_text(view: RankView) -> str:
    """Return a rank's position and its process's activity as the end of a sentence; empty where unknown."""
    phase, load = _phase(view), busy_or_idle(view)
    line = _line(view)
    waits_in = f"waiting in {view.doing.waits_in}" if view.doing is not None and view.doing.waits_in else ""
    known = [f"rank {view.rank} is {waits_in or PHASE_TEXT[phase]}{line and f' ({line})'}"] if phase is not None else []
    known += [f"rank {view.rank} is at {line}"] if phase is None and line else []
    if _is_stopped(view):
        return "; its process is stopped (state T)"
    if load is not None:
        function = view.process.sleeps_in
        is_elsewhere = function and not function.startswith(LOCK_PREFIX)
        activity = f"sleeps in kernel function {function}" if is_elsewhere else f"is {load}"
        activity = "is held by a debugger" if view.process.held else activity
        if (view.process.children_percent or 0.0) >= limit.BUSY_PERCENT:
            activity = "waits for its child processes, which compute"
        known.append(f"its process {activity}" if known else f"the process of rank {view.rank} {activity}")
    last = f"; {view.doing.collectives}" if view.doing is not None and view.doing.collectives else ""
    return ("; " + ", and ".join(known) if known else "") + last


def _line(view: RankView) -> str:
    return (view.doing.line if view.doing is not None else "") or getattr(view.process, "line", "")


def _lines_text(views: Sequence[RankView]) -> str:
    """Return the lines that ranks are at as the end of a sentence; empty where none is known."""
    ranks: dict[str, list[int]] = {}
    for view in views:
        ranks.setdefault(_line(view), []).append(view.rank)
    ranks.pop("", None)
    max_lines = 3  # most lines of code in the message of a run that stands still; first those with the fewest ranks
    shown = sorted(ranks.items(), key=lambda item: len(item[1]))[:max_lines]
    return "".join(f"; {len(of)} ranks are at {at}" if of[1:] else f"; rank {of[0]} is at {at}" for at, of in shown)


def _evidence(view: RankView, silence_s: float) -> dict[str, float]:
    evidence = {"silent_s": silence_s, "last_step": float(view.attempt_step)}
    if steps_s := _step_s([view]):
        evidence["usual_step_s"] = median(steps_s)
    measured = {
        "cpu_percent": getattr(view.process, "cpu_percent", None),
        "core_wait_percent": getattr(view.process, "wait_percent", None),
        "gpu_percent": getattr(view.gpu, "utilization_percent", None),
    }
    return evidence | {name: value for name, value in measured.items() if value is not None}
