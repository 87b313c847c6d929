"""What holds all ranks up alike: waiting for data, or the bare transfer of gradients."""

from __future__ import annotations

from statistics import median, median_low

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.symptom import Symptom, percent
from gputrain_tui.diagnosis.timeline import Timeline, quantile
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
    if len(timeline.steps) < WINDOW:
        return []
    window = timeline.last(WINDOW)
    found = [_input(window), _communication(state, window)]
    return [symptom for symptom in found if symptom is not None]


def _input(window: Timeline) -> Symptom | None:
    # A single rank that reads slowly is a straggler; the lower quartile is deaf to steps that were held up.
    waits = [quantile([row[index].data for row in window.rows], 0.25) for index in range(len(window.ranks))]
    data_ms, base_ms = median_low(waits), window.base_ms
    if base_ms <= 0.0:
        return None
    share = data_ms / base_ms
    return Symptom(
        kind="input_bound",
        value=share,
        threshold=DATA_SHARE,
        severity="critical" if share >= CRITICAL else "warning",
        cause="data",
        step=window.steps[-1],
        message=f"waiting for data takes {percent(share)} of a step ({data_ms:.1f} of {base_ms:.1f} ms)",
        evidence={"data_ms": data_ms, "step_ms": base_ms, "data_share": share},
        advice=ADVICE["input_bound"],
    )


def _communication(state: RunState, window: Timeline) -> Symptom | None:
    wire_ms = window.wire_ms
    if wire_ms is None or len(window.ranks) < 2 or window.base_ms <= 0.0:
        return None
    # The threads that transfer need cores as the ranks do: where those wait, the transfer's time is not the network's.
    if median([cycle.core_wait for row in window.rows for cycle in row]) > STARVED * wire_ms:
        return None
    share = wire_ms / window.base_ms
    evidence = {"wire_exposed_ms": wire_ms, "step_ms": window.base_ms, "wire_share": share}
    computing = median(cycle.forward + cycle.backward for row in window.rows for cycle in row)
    evidence["compute_ms"] = computing
    last = next((view.last for view in state.ranks.values() if view.last is not None), None)
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
        step=window.steps[-1],
        message=f"exchanging gradients takes {percent(share)} of a step that nothing hides "
        f"({wire_ms:.1f} of {window.base_ms:.1f} ms), with no rank late",
        evidence=evidence,
        advice=ADVICE["communication_bound"],
    )
