"""Detects runs bound by their input, by communication or by their own code: delays that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.row import StepRow, base_ms, wire_ms
from gputrain_tui.diagnosis.statistics import lower_quartile
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RunState
from gputrain_tui.state.process_groups import least_transfer_of_calls_ms, transfers


def bounds(state: RunState, timeline: Timeline, *, throttled: bool = False) -> list[Symptom]:
    """Return the symptoms of a run bound by its input or by communication; by the latter not while it is throttled."""
    window = timeline.last(limit.BOUND_WINDOW_STEPS)
    if len(window) < limit.BOUND_WINDOW_STEPS:
        return []
    usual_ms = base_ms(window)
    if usual_ms <= 0.0:
        return []
    symptoms = (_input(window, usual_ms), None if throttled else _communication(state, window))
    return [symptom for symptom in symptoms if symptom is not None]


def _input(window: Sequence[StepRow], usual_ms: float) -> Symptom:
    # A single rank that reads slowly is a straggler; the lower quartile ignores delayed steps.
    data_ms = lower_quartile([row.data_ms for row in window])
    share = data_ms / usual_ms
    return Symptom(
        kind="input_bound",
        value=share,
        threshold=limit.MIN_DATA_SHARE,
        severity="critical" if share >= limit.BOUND_CRITICAL_SHARE else "warning",
        cause="data",
        step=window[-1].step,
        message=f"waiting for data takes {percent(share)} of a step ({data_ms:.1f} of {usual_ms:.1f} ms)",
        evidence={"data_ms": data_ms, "step_ms": usual_ms, "data_share": share},
        advice=ADVICE["input_bound"],
    )


def outside_torch(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return the symptom of a script whose own code is the largest part of its steps.

    A task's steps are those of this package: what it does between optimizer and data is no advice to its user. Nor is
    a pause in few steps, as after each epoch: the median step counts, besides the mean.
    """
    sums = [view.recent for view in state.ranks.values() if view.totals.steps >= limit.BOUND_WINDOW_STEPS]
    shares = [share for each in sums if (share := each.share("other")) is not None]
    rows = timeline.last(limit.BOUND_WINDOW_STEPS)
    if state.plan is not None or len(shares) < len(state.ranks) or not shares or not rows:
        return []
    share = median(shares)
    others = [(each.share("data"), each.compute_share, each.share("optimizer"), each.share("sync")) for each in sums]
    reads = all(view.last is not None and view.last.data_ms is None for view in state.ranks.values())
    largest = max(median([part or 0.0 for part in column]) for column in zip(*others, strict=True))
    return [
        Symptom(
            kind="outside_torch",
            value=min(share, median([row.other_share for row in rows])),
            threshold=max(limit.MIN_DATA_SHARE, largest),
            cause="other",
            step=state.step,
            message=f"{percent(share)} of a step is the script's own code between "
            + ("optimizer, forward and backward" if reads else "optimizer and data"),
            evidence={
                "other_share": share,
                "other_ms": median([each.mean_phase_ms("other") or 0.0 for each in sums]),
                "step_ms": median([each.mean_step_ms or 0.0 for each in sums]),
            },
            advice=ADVICE["outside_torch_data" if reads else "outside_torch"],
        )
    ]


def _communication(state: RunState, window: Sequence[StepRow]) -> Symptom | None:
    bare_ms = wire_ms(window)
    if bare_ms is None or len(window[0].phases) < 2 or not window[-1].synced:
        return None
    of_calls_ms = least_transfer_of_calls_ms({rank: view.groups for rank, view in state.ranks.items()})
    if of_calls_ms is not None:  # ranks that are last in turn within a step wait for each other, not for transfers
        bare_ms = min(bare_ms, of_calls_ms)
    step_ms = median([row.step_ms for row in window])
    share = bare_ms / step_ms
    if share < limit.CLEAR_SHARE * limit.MIN_WIRE_SHARE:
        return None
    # The threads that transfer need cores, too: where ranks wait for cores, the transfer's time is not the network's.
    if median([row.core_wait_ms for row in window]) > limit.MAX_CORE_WAIT_SHARE * bare_ms:
        return None
    evidence = {"wire_exposed_ms": bare_ms, "step_ms": step_ms, "wire_share": share}
    evidence["compute_ms"] = median([row.compute_ms for row in window])
    last = next((view.last for view in state.ranks.values() if view.last is not None), None)
    # The transfer of CPU ranks includes their wait for a core if that was not measured; on a GPU there is none.
    estimate = last is not None and last.core_wait_ms is None and state.ranks[last.rank].device in (None, "cpu")
    if last is not None and last.sync_bytes is not None:
        evidence["sync_bytes"] = float(last.sync_bytes)
    if (bandwidth := state.bus_bytes_per_s) is not None:
        evidence["bus_bytes_per_s"] = bandwidth
    in_groups = bool(window[-1].group_waits)
    what = "communication" if in_groups else "gradient exchange"
    return Symptom(
        kind="communication_bound",
        value=share,
        threshold=limit.MIN_WIRE_SHARE,
        severity="critical" if share >= limit.BOUND_CRITICAL_SHARE else "warning",
        cause="communication",
        step=window[-1].step,
        message=f"{what} that computing does not hide takes {percent(share)} of a step "
        f"({bare_ms:.1f} of {step_ms:.1f} ms): even the last rank waits that long{_most(window)}"
        + (" (at most: waits for a core were not measured and are included)" if estimate else ""),
        evidence=evidence,
        advice=ADVICE["communication_bound_groups" if in_groups else "communication_bound"],
    )


def _most(window: Sequence[StepRow]) -> str:
    """Return in which groups the transfers take longest, as the end of a sentence; empty with groups of one name."""
    total_ms: dict[str, list[float]] = {}
    for row in window:
        for group, bare_ms in transfers(row.group_waits).items():
            total_ms.setdefault(group.name, []).append(bare_ms)
    if len(total_ms) < 2:
        return ""
    return f", longest in {max(total_ms, key=lambda name: median(total_ms[name]))}"
