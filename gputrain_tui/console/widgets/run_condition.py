"""The condition of a run in a few words, for the header."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.state import RunState
from gputrain_tui.tables import printable
from trainer.contract.record import Finding

MARKS = {"critical": ("✗", "error"), "warning": ("▲", "warning"), "info": ("·", "dim")}
"""Mark and role per severity."""
URGENCY = {severity: place for place, severity in enumerate(MARKS)}
CAUSES = {
    "data": "data loading",
    "h2d": "copying batches",
    "garbage_collection": "garbage collection",
    "cpu_steal": "stolen CPU time",
    "core_wait": "no free core",
    "gpu_clock": "GPU clock",
    "gpu_thermal": "GPU heat",
    "unattributed": "",
}
"""Causes that are not called what they are."""
WORDS = {
    "input_bound": "waits for data",
    "communication_bound": "waits for the network",
    "memory_creep": "memory grows",
    "non_finite": "not a finite number",
    "loss_spike": "the loss jumped",
    "stalled": "stalled",
    "desync": "parameters differ",
}
"""What is found, where the name of its kind is clumsy."""
LEAST_STEPS = 20
"""Fewest steps before a run without findings counts as healthy."""


def run_condition(state: RunState) -> list[Row]:
    """Return the worst active finding and the number of others, in ever shorter forms."""
    findings = sorted(state.findings.values(), key=_order)
    if not findings:
        return [[("✓ no findings", "dim")]] if state.step >= LEAST_STEPS else []
    worst = findings[0]
    mark, role = MARKS.get(worst.severity, MARKS["warning"])
    text = printable(finding_summary(worst))
    more = f"  +{len(findings) - 1:,} more" if len(findings) > 1 else ""
    forms = dict.fromkeys((text + more, text, text.partition(":")[0]))
    return [[(f"{mark} {form}", role)] for form in forms]


def finding_summary(finding: Finding) -> str:
    """Return a finding in a few words: rank, problem, and after a colon its cause."""
    who = f"rank {finding.rank} " if finding.rank is not None else ""
    if finding.kind != "straggler":
        return who + WORDS.get(finding.kind, finding.kind.replace("_", " "))
    cause = CAUSES.get(finding.cause or "", (finding.cause or "").replace("_", " "))
    late_ms = finding.evidence.get("late_ms")
    return f"{who}late" + (f" {late_ms:.0f} ms" if late_ms is not None else "") + (f": {cause}" if cause else "")


def _order(finding: Finding) -> tuple[int, float]:
    return URGENCY.get(finding.severity, 1), -finding.evidence.get("late_ms", 0.0)
