"""A symptom: the result of one check of a run, before hysteresis decides whether it is a finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gputrain_tui.state import RunState

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """A possible finding with its magnitude."""

    kind: str
    rank: int | None = None
    """None for the run as a whole."""
    host: str | None = None
    """Host that it is about; None for that of the rank."""
    ranks: tuple[int, ...] = ()
    """All ranks that it is about, where these are several."""
    value: float
    """Magnitude, in the unit of ``threshold``."""
    threshold: float
    """Value from which the symptom is a finding; it is cleared at ``CLEAR_SHARE`` of its threshold when raised."""
    confirmed: bool = True
    """Whether it has lasted long enough to be raised."""
    severity: Severity = "warning"
    cause: str | None = None
    step: int | None = None
    line: str = ""
    """Innermost line of the user's code in which a stalled rank is."""
    message: str = ""
    evidence: dict[str, float] = field(default_factory=dict)
    """Numbers by name; the name ends in the unit."""
    advice: str = ""


def host_and_device(state: RunState, rank: int) -> tuple[str | None, str | None]:
    """Return a rank's host and device."""
    view = state.ranks.get(rank)
    return (view.host, view.device) if view is not None else (None, None)


def percent(share: float) -> str:
    """Return a share as whole percents."""
    return f"{100 * share:.0f} %"
