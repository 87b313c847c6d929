"""What accounts for a rank's lateness: a part of its step, or what lies below the phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gputrain_tui.diagnosis.advice import NAMES, THROTTLED
from gputrain_tui.diagnosis.row import PHASES, CycleRow
from gputrain_tui.diagnosis.statistics import median, midmean
from gputrain_tui.state import RunState

COVERS = 0.80
"""Share of the lateness that a cause must account for to be named."""
STANDS_OUT = 4.0
"""How many times as much longer one phase must be than the rest of the rank's work, each by its usual time.

With less all of its work is slower, as on a slower core or device, and the phase is only the largest.
"""
NEGLIGIBLE = 0.05
"""Share of the lateness that the rest of the work may have, however short it is."""
ON_DEVICE = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a rank is late."""

    name: str
    """As in ``NAMES``, or ``unattributed``."""
    because: str
    """How the sentence about the lateness ends."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """What the machine's samples add, by name and unit."""


def cause_of(
    state: RunState,
    rank: int,
    late_ms: float,
    phases: Mapping[str, float],
    window: Sequence[CycleRow],
    ranks: Sequence[int],
) -> Cause:
    """Return what accounts for a lateness; of what overlaps, what lies deeper comes first.

    Args:
        state: the run, for the samples of its machines.
        rank: who is late.
        late_ms: by how much in these steps.
        phases: by how much each part of its work is longer than the other ranks' in them, ms.
        window: the steps that were looked at, in which it was late.
        ranks: all, in the order of the rows.
    """
    least = COVERS * late_ms
    if phases["gc"] >= least:
        return _named("garbage_collection")
    index = ranks.index(rank)
    stolen = _steal_share(state, rank)
    if stolen * median([row.cycles[index].own for row in window]) >= least:
        return _named("cpu_steal", {"steal_excess_percent": 100 * stolen})
    if sum(phases[phase] for phase in ON_DEVICE) >= least:
        on_device = median([c.forward + c.backward + c.optimizer for c in (row.cycles[index] for row in window)])
        if (cause := _clocked_down(state, rank, on_device, least)) is not None:
            return cause
    phase = max(PHASES, key=phases.__getitem__)
    if phases[phase] >= least and phase != "other":
        if _stands_out(phase, phases[phase], late_ms, index, window):
            return _named(phase)
        because = f"as all that it does takes longer, most of all {NAMES[phase]} (+{phases[phase]:.1f} ms)"
        return Cause(name="unattributed", because=because)
    if len(longer := [name for name in PHASES if phases[name] >= 0.1 * late_ms]) > 1:
        told = ", ".join(f"{name} +{phases[name]:.1f} ms" for name in longer)
        return Cause(name="unattributed", because=f"for no single reason: {told}")
    return Cause(name="unattributed", because="for a reason that no measured part of the step accounts for")


def _named(name: str, evidence: Mapping[str, float] | None = None) -> Cause:
    return Cause(name=name, because=f"because of {NAMES[name]}", evidence=evidence or {})


def _stands_out(phase: str, excess_ms: float, late_ms: float, index: int, window: Sequence[CycleRow]) -> bool:
    """Tell whether a phase is longer out of proportion to the rest of what the rank does."""
    own_ms = median([row.cycles[index].own for row in window]) - late_ms
    part_ms = median([getattr(row.cycles[index], phase) for row in window]) - excess_ms
    # What is short is hit in fewer than half of the steps, of which a median would show nothing.
    rest_late_ms = midmean([row.own_excess[index] - row.excess(phase, index) for row in window])
    rest_ms = own_ms - part_ms
    # Longer each by its usual time, multiplied out: a phase or a rest may usually take no time at all.
    return rest_late_ms <= NEGLIGIBLE * late_ms or excess_ms * rest_ms >= STANDS_OUT * rest_late_ms * part_ms


def _steal_share(state: RunState, rank: int) -> float:
    """Return the share of time that other guests of its host take from a rank, more than from those of other nodes."""
    node = state.ranks[rank].node
    shares = {number: sample.steal_percent or 0.0 for number, sample in state.nodes.items()}
    others = [share for number, share in shares.items() if number != node]
    return max(0.0, shares[node] - median(others)) / 100 if node in shares and others else 0.0


def _clocked_down(state: RunState, rank: int, on_device_ms: float, least_ms: float) -> Cause | None:
    """Return that a GPU's clock is lower than the other ranks', were its speed its clock; with the driver's reasons.

    Reasons alone say little: most drivers name the power cap on every busy GPU. Without them a lower clock is the
    GPU's own kind or a setting, which stays as it is.
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
    if gpu.temperature_celsius is not None:
        evidence["temperature_celsius"] = gpu.temperature_celsius
    if gpu.power_watts is not None:
        evidence["power_watts"] = gpu.power_watts
    at = f" ({gpu.sm_clock_mhz} MHz, the others {usual:.0f} MHz)"
    heat = any(reason.startswith("thermal") for reason in gpu.throttle_reasons)
    name = "gpu_thermal" if heat else "gpu_clock"
    reasons = [] if heat else [THROTTLED[reason] for reason in gpu.throttle_reasons if reason in THROTTLED]
    why = f", held down by {' and '.join(reasons)}" if reasons else ""
    if heat and gpu.temperature_celsius is not None:
        at = f" ({gpu.sm_clock_mhz} MHz at {gpu.temperature_celsius:.0f} °C, the others {usual:.0f} MHz)"
    return Cause(name=name, because=f"because of {NAMES[name]}{at}{why}", evidence=evidence)
