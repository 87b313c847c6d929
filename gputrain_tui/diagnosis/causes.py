"""Attributes a rank's lateness to a phase of its step, or to a cause below the phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import CAUSE_NAMES, THROTTLE_NAMES
from gputrain_tui.diagnosis.row import DEVICE_PHASES, PHASES, StepRow
from gputrain_tui.diagnosis.statistics import midmean
from gputrain_tui.state import RunState


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of a rank's lateness."""

    name: str
    """As in ``CAUSE_NAMES``, or ``unattributed``."""
    because: str
    """End of the sentence about the lateness."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """From the machine's samples, by name and unit."""
    has_parts: bool = False
    """Whether ``because`` ends with the excess of phases, which the reader adds up."""


def cause_of(
    state: RunState,
    rank: int,
    late_ms: float,
    phases: Mapping[str, float],
    window: Sequence[StepRow],
    ranks: Sequence[int],
) -> Cause:
    """Return the cause of a rank's lateness in a window; of overlapping causes the more specific one.

    ``phases`` has the excess of each phase over the other ranks', ms; ``ranks`` all ranks in the order of the rows.
    """
    least = limit.MIN_EXPLAINED_SHARE * late_ms
    if phases["gc"] >= least:
        return known_cause("garbage_collection")
    index = ranks.index(rank)
    stolen = _steal_excess(state, rank)
    if stolen * median([row.phases[index].own for row in window]) >= least:
        return known_cause("cpu_steal", {"steal_excess_percent": 100 * stolen})
    held_back = _throttled_excess(state, rank)
    if held_back * median([row.phases[index].own for row in window]) >= least:
        return known_cause("cpu_quota", {"throttled_excess_percent": 100 * held_back})
    if sum(phases[phase] for phase in DEVICE_PHASES) >= least:
        on_device = median([c.forward + c.backward + c.optimizer for c in (row.phases[index] for row in window)])
        if (cause := _lower_clock(state, rank, on_device, least)) is not None:
            return cause
    phase = max(PHASES, key=phases.__getitem__)
    if phases[phase] >= least and phase != "other":
        if _is_out_of_proportion(phase, phases[phase], late_ms, index, window):
            return known_cause(phase)
        because = f"because all of its phases take longer, most of all {CAUSE_NAMES[phase]} (+{phases[phase]:.1f} ms)"
        return Cause(name="unattributed", because=because)
    measured = (last := state.ranks[rank].last) is not None and last.forward_ms is not None
    if phase == "other" and phases[phase] >= least and state.plan is None and measured:
        return _own_code(state, rank)
    if len(longer := [name for name in PHASES if phases[name] >= 0.1 * late_ms]) > 1:
        known = ", ".join(f"{name} +{phases[name]:.1f} ms" for name in longer)
        return Cause(name="unattributed", because=f"for no single reason: {known}", has_parts=True)
    return Cause(name="unattributed", because="for a reason outside the measured phases of the step")


def known_cause(name: str, evidence: Mapping[str, float] | None = None) -> Cause:
    """Return a cause of ``CAUSE_NAMES``."""
    return Cause(name=name, because=f"because of {CAUSE_NAMES[name]}", evidence=evidence or {})


def _own_code(state: RunState, rank: int) -> Cause:
    """Return the cause of a script's time between the calls of torch that are measured: a task's is not its user's."""
    last = state.ranks[rank].last
    reads = last is not None and last.data_ms is None
    how = ", where it also reads its data, without a DataLoader" if reads else ""
    return Cause(name="other", because=f"because of {CAUSE_NAMES['other']}{how}")


def _is_out_of_proportion(phase: str, excess_ms: float, late_ms: float, index: int, window: Sequence[StepRow]) -> bool:
    """Whether a phase is longer out of proportion to the rest of the rank's work."""
    own_ms = median([row.phases[index].own for row in window]) - late_ms
    part_ms = median([getattr(row.phases[index], phase) for row in window]) - excess_ms
    # Short work is delayed in fewer than half of the steps, which a median would not show.
    rest_late_ms = midmean([row.own_excess[index] - row.excess(phase, index) for row in window])
    rest_ms = own_ms - part_ms
    # The ratio of both relative excesses, multiplied out: either usual time may be zero.
    return (
        rest_late_ms <= limit.NEGLIGIBLE_SHARE * late_ms
        or excess_ms * rest_ms >= limit.MIN_PHASE_RATIO * rest_late_ms * part_ms
    )


def _steal_excess(state: RunState, rank: int) -> float:
    """Return a rank's CPU steal, as a share of time, in excess of the other nodes' median."""
    node = state.ranks[rank].node
    shares = {number: sample.steal_percent or 0.0 for number, sample in state.nodes.items()}
    others = [share for number, share in shares.items() if number != node]
    return max(0.0, shares[node] - median(others)) / 100 if node in shares and others else 0.0


def _throttled_excess(state: RunState, rank: int) -> float:
    """Return the share of time for which a CPU quota holds a rank back, in excess of the other ranks' median."""
    samples = (each for sample in state.nodes.values() for each in sample.ranks)
    shares = {each.rank: (each.cpu_throttled_percent or 0.0) / 100 for each in samples}
    own = shares.pop(rank, 0.0)
    return max(0.0, own - median(shares.values())) if own and shares else 0.0


def _lower_clock(state: RunState, rank: int, on_device_ms: float, least_ms: float) -> Cause | None:
    """Return the cause ``gpu_clock`` or ``gpu_thermal`` if a lower clock than the other ranks' explains the lateness.

    The driver's throttle reasons alone are no evidence: most drivers report the power cap on every busy GPU. A lower
    clock without reasons is another GPU model or a setting.
    """
    gpu = state.ranks[rank].gpu
    clocks = [
        view.gpu.sm_clock_mhz
        for r, view in state.ranks.items()
        if r != rank and view.gpu is not None and view.gpu.sm_clock_mhz
    ]
    if gpu is None or not gpu.sm_clock_mhz or not clocks:
        return None
    usual = median(clocks)
    if gpu.sm_clock_mhz >= usual or on_device_ms * (1 - gpu.sm_clock_mhz / usual) < least_ms:
        return None
    evidence = {"sm_clock_mhz": float(gpu.sm_clock_mhz), "usual_sm_clock_mhz": float(usual)}
    for name in ("temperature_celsius", "power_watts"):
        if (value := getattr(gpu, name)) is not None:
            evidence[name] = value
    at = f" ({gpu.sm_clock_mhz} MHz, the others {usual:.0f} MHz)"
    heat = any(reason.startswith("thermal") for reason in gpu.throttle_reasons)
    name = "gpu_thermal" if heat else "gpu_clock"
    reasons = [] if heat else [THROTTLE_NAMES[reason] for reason in gpu.throttle_reasons if reason in THROTTLE_NAMES]
    why = f", held down by {' and '.join(reasons)}" if reasons else ""
    if heat and gpu.temperature_celsius is not None:
        at = f" ({gpu.sm_clock_mhz} MHz at {gpu.temperature_celsius:.0f} °C, the others {usual:.0f} MHz)"
    return Cause(name=name, because=f"because of {CAUSE_NAMES[name]}{at}{why}", evidence=evidence)
