"""A symptom: what one check of a run shows, before hysteresis decides whether it is a finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gputrain_tui.state import RunState

Severity = Literal["info", "warning", "critical"]
CLEARED = 0.5
"""Share of the threshold below which a finding is cleared; what shows less of it need not be told."""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """Something that may be wrong, and how much of it there is."""

    kind: str
    rank: int | None = None
    """None where it is nobody's own."""
    value: float
    """How much; in the unit of ``threshold``."""
    threshold: float
    """From how much on it is a finding. A finding is cleared at half of what this was when it was raised."""
    confirmed: bool = True
    """Whether it has lasted long enough to be raised."""
    severity: Severity = "warning"
    cause: str | None = None
    step: int | None = None
    """The newest step that was looked at."""
    message: str = ""
    evidence: dict[str, float] = field(default_factory=dict)
    """Numbers by name; the name ends in the unit."""
    advice: str = ""


def who(state: RunState, rank: int) -> tuple[str | None, str | None]:
    """Return a rank's host and device."""
    view = state.ranks.get(rank)
    return (view.host, view.device) if view is not None else (None, None)


def percent(share: float) -> str:
    """Return a share as whole percents."""
    return f"{100 * share:.0f} %"
