"""What holds all ranks up alike: waiting for data, or the bare transfer of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.row import CycleRow, base_ms, wire_ms
from gputrain_tui.diagnosis.statistics import median, median_low, quantile
from gputrain_tui.diagnosis.symptom import CLEARED, Symptom, percent
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.state import RunState

WINDOW = 60
"""Steps that are looked at; nobody loses anything when such a finding comes a minute later."""
DATA_SHARE = 0.30
"""Share of a step spent waiting for data from which a run is bound by its input."""
WIRE_SHARE = 0.40
"""Share of a step spent in transfers that nothing hides from which it is bound by communication."""
CRITICAL = 0.60
STARVED = 0.5
"""Share of the transfers' time that ranks may wait for cores where it is still the network's."""


def bounds(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return what the run as a whole is bound by."""
    window = timeline.last(WINDOW)
    if len(window) < WINDOW:
        return []
    usual_ms = base_ms(window)
    if usual_ms <= 0.0:
        return []
    found = [_input(window, usual_ms), _communication(state, window, usual_ms)]
    return [symptom for symptom in found if symptom is not None]


def _input(window: Sequence[CycleRow], usual_ms: float) -> Symptom:
    # A single rank that reads slowly is a straggler; the lower quartile is deaf to steps that were held up.
    series = zip(*([cycle.data for cycle in row.cycles] for row in window), strict=True)
    data_ms = median_low([quantile(waits, 0.25) for waits in series])
    share = data_ms / usual_ms
    return Symptom(
        kind="input_bound",
        value=share,
        threshold=DATA_SHARE,
        severity="critical" if share >= CRITICAL else "warning",
        cause="data",
        step=window[-1].step,
        message=f"waiting for data takes {percent(share)} of a step ({data_ms:.1f} of {usual_ms:.1f} ms)",
        evidence={"data_ms": data_ms, "step_ms": usual_ms, "data_share": share},
        advice=ADVICE["input_bound"],
    )


def _communication(state: RunState, window: Sequence[CycleRow], usual_ms: float) -> Symptom | None:
    bare_ms = wire_ms(window)
    if bare_ms is None or len(window[0].cycles) < 2 or not window[-1].synced:
        return None
    share = bare_ms / usual_ms
    if share < CLEARED * WIRE_SHARE:
        return None
    # The threads that transfer need cores as the ranks do: where those wait, the transfer's time is not the network's.
    if median([row.core_wait_ms for row in window]) > STARVED * bare_ms:
        return None
    evidence = {"wire_exposed_ms": bare_ms, "step_ms": usual_ms, "wire_share": share}
    evidence["compute_ms"] = median([row.compute_ms for row in window])
    last = next((view.last for view in state.ranks.values() if view.last is not None), None)
    # On a GPU nothing waits for a core; of CPU ranks that do not count it, the transfer has it in it.
    estimate = last is not None and last.core_wait_ms is None and state.ranks[last.rank].device in (None, "cpu")
    if last is not None and last.sync_bytes is not None:
        evidence["sync_bytes"] = float(last.sync_bytes)
    if (bandwidth := state.bus_bytes_per_s) is not None:
        evidence["bus_bytes_per_s"] = bandwidth
    return Symptom(
        kind="communication_bound",
        value=share,
        threshold=WIRE_SHARE,
        severity="critical" if share >= CRITICAL else "warning",
        cause="communication",
        step=window[-1].step,
        message=f"exchanging gradients takes {percent(share)} of a step that nothing hides "
        f"({bare_ms:.1f} of {usual_ms:.1f} ms), with no rank late"
        + (" (at most: waits for a core were not measured and are in it)" if estimate else ""),
        evidence=evidence,
        advice=ADVICE["communication_bound"],
    )
