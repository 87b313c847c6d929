"""A symptom: the result of one check of a run, before hysteresis decides whether it is a finding."""

from __future__ import annotations

from gputrain_tui.state import RankView
from trainer.contract.record import Finding


class Symptom(Finding, kw_only=True, tag="symptom"):
    """A possible finding with its magnitude; the hysteresis adds the time, and host and device of a rank."""

    time: float = 0.0
    value: float
    """Magnitude, in the unit of ``threshold``."""
    threshold: float
    """Value from which the symptom is a finding; it is cleared at ``CLEAR_SHARE`` of its threshold when raised."""
    confirmed: bool = True
    """Whether it has lasted long enough to be raised."""

    @property
    def is_certain(self) -> bool:
        """Whether it is large enough and has lasted long enough to be raised."""
        return self.confirmed and self.value >= self.threshold

    def finding(self, view: RankView | None, now: float) -> Finding:
        """Return the finding; ``view``: its rank."""
        finding = Finding(**{name: getattr(self, name) for name in Finding.__struct_fields__})
        finding.time, finding.diagnosed = now, True
        finding.evidence = {name: round(value, 4) for name, value in self.evidence.items()}
        if self.host is None and view is not None:
            finding.host, finding.device = view.host, view.device
        return finding


def percent(share: float) -> str:
    """Return a share as whole percents."""
    return f"{100 * share:.0f} %"
