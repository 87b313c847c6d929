"""Who makes the others wait, and with what: lateness in excess over the other ranks, significant against the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from gputrain_tui.diagnosis.advice import ADVICE, NAMES
from gputrain_tui.diagnosis.symptom import Severity, Symptom, percent
from gputrain_tui.diagnosis.timeline import PARTS, Timeline, jitter, spread
from gputrain_tui.state import RunState

WINDOW = 12
"""Steps that must agree; more than half of them are over 13 steps after a rank became slow."""
LEAST_STEPS = 20
"""Steps to know a run by, before anything is said."""
WARNING, CRITICAL = 0.10, 0.20
"""Share of a step that a rank is late (TraceML's gates)."""
AT_ONCE = 0.15
"""Share of a step from which one window is enough; for less, ``SUSTAINED`` windows must all show it."""
SUSTAINED = 4
COVERS = 0.80
"""Share of the lateness that a cause must account for to be named."""
AGREEING = 0.75
"""Share of the window's steps in which the rank must be late by at least half of the median."""
STEP_SIGMAS = 6.0
"""Standard errors of the window's median, from the difference between one step and the next."""
BLOCK_SIGMAS = 4.0
"""Standard deviations of earlier windows' medians, which also tell noise that comes in bursts."""
LEAST_BLOCKS = 4
"""Earlier windows from which that can be told."""
CORE_BLOCKS = 8
"""Windows over which a rank must have waited for a core: bursts of other work on the machine are shorter."""
CORE_AGREEING = 0.80


def stragglers(state: RunState, timeline: Timeline) -> list[Symptom]:
    """Return the ranks that are late by something, with the cause where one accounts for it."""
    if len(timeline.ranks) < 2 or len(timeline.steps) < LEAST_STEPS:
        return []
    if all(cycle.exposed is None for row in timeline.rows[-WINDOW:] for cycle in row):
        return []  # these ranks do not wait for each other
    found = []
    own, waits = timeline.excess("own"), timeline.excess("core_wait")
    window = timeline.last(WINDOW)
    base_ms = window.base_ms
    for index in range(len(timeline.ranks)):
        symptom = _slow(state, window, index, own[index], base_ms)
        if symptom is None or symptom.value < symptom.threshold:
            symptom = _without_core(state, timeline, index, waits[index]) or symptom
        if symptom is not None:
            found.append(symptom)
    return found


def _slow(state: RunState, window: Timeline, index: int, late: Sequence[float], base_ms: float) -> Symptom | None:
    """Judge what a rank itself does longer than the others.

    Args:
        state: the run.
        window: the last steps.
        index: the rank's place in the window.
        late: per step, its excess over the others' median, ms.
        base_ms: how long a step takes with a core for everybody and nobody late.
    """
    recent = late[-WINDOW:]
    middle = median(recent)
    step_ms = base_ms + max(middle, 0.0)
    gate = WARNING * step_ms
    if middle < gate / 2:
        return None
    blocks = [median(late[-WINDOW * (n + 1) : len(late) - WINDOW * n]) for n in range(len(late) // WINDOW)][:SUSTAINED]
    lasting = middle >= AT_ONCE * step_ms or (len(blocks) == SUSTAINED and min(blocks) >= gate)
    noise = _noise(late)
    threshold = max(gate, noise)
    agreeing = [place for place, value in enumerate(recent) if value >= middle / 2]
    parts = _parts(window, index, agreeing)
    cause = _cause(state, window.ranks[index], parts, middle, window)
    share = middle / step_ms
    rank = window.ranks[index]
    return Symptom(
        kind="straggler",
        rank=rank,
        value=middle,
        threshold=threshold,
        confirmed=lasting and len(agreeing) >= AGREEING * len(recent),
        severity=_severity(share),
        cause=cause,
        step=window.steps[-1],
        message=f"rank {rank} is {middle:.1f} ms late in each step ({percent(share)} of a step), "
        + ("for no single reason" if cause == "unattributed" else f"because of {NAMES[cause]}"),
        evidence={
            "late_ms": middle,
            "step_ms": step_ms,
            "late_share": share,
            "threshold_ms": threshold,
            "noise_ms": noise,
            **_waited(window, index, agreeing),
            **{f"{part}_excess_ms": value for part, value in parts.items() if abs(value) >= 0.05 * middle},
        },
        advice=ADVICE[cause],
    )


def _without_core(state: RunState, timeline: Timeline, index: int, waits: Sequence[float]) -> Symptom | None:
    """Judge how much longer than the others a rank waits for a core, over a longer time: that comes in bursts."""
    count = WINDOW * CORE_BLOCKS
    if len(waits) < count:
        return None
    recent = waits[-count:]
    middle = median(recent)
    step_ms = median([row[index].step for row in timeline.last(count).rows])
    gate = WARNING * step_ms
    if middle < gate / 2:
        return None
    blocks = [median(recent[start : start + WINDOW]) for start in range(0, count, WINDOW)]
    threshold = max(gate, BLOCK_SIGMAS * spread(blocks))
    steady = min(blocks) >= gate and sum(value >= middle / 2 for value in recent) >= CORE_AGREEING * count
    rank, share = timeline.ranks[index], middle / step_ms
    return Symptom(
        kind="straggler",
        rank=rank,
        value=middle,
        threshold=threshold,
        confirmed=steady,
        severity=_severity(share),
        cause="core_wait",
        step=timeline.steps[-1],
        message=f"rank {rank} is {middle:.1f} ms late in each step ({percent(share)} of a step), "
        f"because of {NAMES['core_wait']}",
        evidence={
            "late_ms": middle,
            "step_ms": step_ms,
            "late_share": share,
            "threshold_ms": threshold,
            "core_wait_excess_ms": middle,
            **_waited(timeline.last(count), index, range(count)),
        },
        advice=ADVICE["core_wait"],
    )


def _severity(share: float) -> Severity:
    return "critical" if share >= CRITICAL else "warning"


def _noise(late: Sequence[float]) -> float:
    """Return how late a rank must be over a window not to be taken for noise, ms."""
    step_to_step = STEP_SIGMAS * 1.2533 * jitter(late) / math.sqrt(WINDOW)  # 1.2533: a median's against a mean's
    earlier = late[:-WINDOW]
    starts = range(len(earlier) % WINDOW, len(earlier), WINDOW)
    blocks = [median(earlier[start : start + WINDOW]) for start in starts]
    in_bursts = BLOCK_SIGMAS * spread(blocks) if len(blocks) >= LEAST_BLOCKS else 0.0
    return max(step_to_step, in_bursts)


def _parts(window: Timeline, index: int, places: Sequence[int]) -> dict[str, float]:
    """Return by how much each part of a rank's work exceeds the other ranks' median, ms, median over some steps."""
    found = {}
    for part in (*PARTS, "gc"):
        series = window.excess(part)[index]
        found[part] = median(series[place] for place in places) if places else 0.0
    return found


def _waited(window: Timeline, index: int, places: Sequence[int]) -> dict[str, float]:
    """Return the lateness as the synchronisation shows it: by how much the longest wait exceeds this rank's, ms."""
    late = []
    for place in places:
        waits = [cycle.exposed or 0.0 for cycle in window.rows[place]]
        late.append(max(waits) - waits[index])
    return {"sync_late_ms": median(late)} if late else {}


def _cause(state: RunState, rank: int, parts: dict[str, float], late_ms: float, window: Timeline) -> str:
    """Return what accounts for the lateness; of what overlaps, what lies deeper comes first."""
    least = COVERS * late_ms
    if parts["gc"] >= least:
        return "garbage_collection"
    if _stolen_ms(state, rank, window) >= least:
        return "cpu_steal"
    on_device = parts["forward"] + parts["backward"] + parts["optimizer"]
    if on_device >= least and _throttled_ms(state, rank, window) >= least:
        return "gpu_clock"
    part = max(PARTS, key=parts.__getitem__)
    return part if parts[part] >= least and part != "other" else "unattributed"


def _stolen_ms(state: RunState, rank: int, window: Timeline) -> float:
    """Return what other guests of its host take from a rank per step, more than from the ranks of other nodes."""
    node = state.ranks[rank].node
    shares = {number: sample.steal_percent or 0.0 for number, sample in state.nodes.items()}
    others = [share for number, share in shares.items() if number != node]
    if node not in shares or not others:
        return 0.0
    index = window.ranks.index(rank)
    share: float = max(0.0, shares[node] - median(others)) / 100
    return share * median([row[index].own for row in window.rows])


def _throttled_ms(state: RunState, rank: int, window: Timeline) -> float:
    """Return what a GPU's lower clock costs per step, were its speed its clock."""
    clocks = {r: view.gpu.sm_clock_mhz for r, view in state.ranks.items() if view.gpu is not None}
    own = clocks.get(rank)
    others = [clock for r, clock in clocks.items() if r != rank and clock]
    if not own or not others or own >= median(others):
        return 0.0
    index = window.ranks.index(rank)
    work = [row[index].forward + row[index].backward + row[index].optimizer for row in window.rows]
    lost = 1 - own / median(others)
    return float(median(work) * lost)
