"""Condition of a run in a few words, for the header."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.diagnosis.roll_up import roll_up
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import by_urgency, failure_summary, finding_summary, run_mark
from gputrain_tui.state.standstill import Standstill
from gputrain_tui.tables import printable

MARKS = {"critical": ("✗", "error"), "warning": ("▲", "warning"), "info": ("·", "dim")}
"""Mark and role of each severity."""
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
    if status in ENDED and (standing := printable(run_mark(findings))):
        forms = dict.fromkeys((standing, standing.partition(" and ")[0], standing.partition(":")[0]))
        return [[(f"{mark} {form}", "warning")] for form in forms]
    more = f"  +{len(findings) - 1:,} more" if len(findings) > 1 else ""
    forms = dict.fromkeys((text + more, text, text.partition(":")[0]))
    return [[(f"{mark} {form}", role)] for form in forms]
