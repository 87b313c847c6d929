"""Condition of a run in a few words, for the header."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.diagnosis.roll_up import roll_up
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.state import RunState
from gputrain_tui.state.failure_words import failure_words
from gputrain_tui.state.standstill import Standstill
from gputrain_tui.tables import printable
from trainer.contract.record import Failure, Finding

MARKS = {"critical": ("✗", "error"), "warning": ("▲", "warning"), "info": ("·", "dim")}
"""Mark and role of each severity."""
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
"""Texts of causes, where the identifier does not read well."""
WORDS = {
    "input_bound": "waits for data",
    "communication_bound": "waits for the network",
    "cpu_contention": "too few cores",
    "imbalance": "uneven work",
    "memory_creep": "memory grows",
    "non_finite": "NaN or infinite",
    "host_silent": "is silent",
    "loss_spike": "the loss jumped",
    "stalled": "stalled",
    "desync": "parameters differ",
}
"""Texts of kinds of findings, where the identifier does not read well."""
HOST_KINDS = ("cpu_contention", "host_silent")
"""Kinds of findings about a host; their rank is the host's first one."""
LEAST_STEPS = 20
"""Fewest steps before a run without findings counts as healthy."""


def run_condition(state: RunState, status: str = "running", standstill: Standstill | None = None) -> list[Row]:
    """Return the worst standing finding and the number of others, or a failed run's failure; the longest form first."""
    if status not in ("running", *ENDED):
        return []
    if status == "failed":
        return [] if state.root_cause is None else [[(failure_summary(state.root_cause), "error")]]
    findings = sorted(roll_up(state.findings.values(), state.ranks), key=by_urgency)
    if not findings:
        is_still = standstill is not None and standstill.is_long
        return [[("✓ no findings", "dim")]] if state.step >= LEAST_STEPS and not is_still else []
    worst = findings[0]
    mark, role = MARKS.get(worst.severity, MARKS["warning"])
    text = printable(finding_summary(worst))
    if status in ENDED:
        role = "dim" if role == "dim" else "warning"
    more = f"  +{len(findings) - 1:,} more" if len(findings) > 1 else ""
    forms = dict.fromkeys((text + more, text, text.partition(":")[0]))
    return [[(f"{mark} {form}", role)] for form in forms]


def finding_summary(finding: Finding) -> str:
    """Return a finding in a few words: rank or host, problem, and after a colon the cause."""
    subject = _subject(finding)
    cause = CAUSES.get(finding.cause or "", (finding.cause or "").replace("_", " "))
    if finding.kind != "straggler":
        text = subject + WORDS.get(finding.kind, finding.kind.replace("_", " "))
        return f"{text}: {cause}" if finding.kind == "stalled" and cause else text
    late_ms = finding.evidence.get("late_ms")
    return f"{subject}late" + (f" {late_ms:.0f} ms" if late_ms is not None else "") + (f": {cause}" if cause else "")


def _subject(finding: Finding) -> str:
    """Return the subject of a finding and a blank: a rank, ranks of a node, or a host; empty for the run."""
    if finding.rank is None:
        return ""
    if finding.kind in HOST_KINDS and finding.host:
        return f"{finding.host} "
    ranks = finding.evidence.get("ranks", 1) if finding.kind == "straggler" else 1
    return f"{ranks:.0f} ranks of {finding.host or 'a node'} " if ranks > 1 else f"rank {finding.rank} "


def failure_summary(failure: Failure) -> str:
    """Return a failure in a few words: rank, kind and step."""
    who = f"rank {failure.rank} " if failure.rank is not None else ""
    at = f" at step {failure.step:,}" if failure.step is not None else ""
    return who + failure_words(failure) + at


def by_urgency(finding: Finding) -> tuple[int, float]:
    """Return a sort key of findings: the most severe first, then the greatest lateness."""
    return URGENCY.get(finding.severity, 1), -finding.evidence.get("late_ms", 0.0)
