"""The result of one preflight check: its severity, the recipe's key and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gputrain_tui.plan.planner import Plan
from trainer.contract.errors import RequestError

Status = Literal["ok", "note", "warning", "error"]
"""An error keeps a run from starting; a warning and a note do not."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check."""

    status: Status
    check: str
    """What was looked at, in a word or two: ``data``, ``port``."""
    what: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty where nothing needs doing."""
    key: str = ""
    """The recipe's key that it concerns, as ``--set`` names it; empty for none."""
    where: str = ""
    """``FILE:LINE: KEY``; empty for no key."""
    host: str = ""
    """The machine, where it is not this one."""

    @property
    def line(self) -> str:
        """Where, what and the fix in one line."""
        told = f"{self.what}; {self.fix}" if self.fix else self.what
        return f"{self.where}: {told}" if self.where else told


class NotReadyError(RequestError):
    """The recipe is right, but the machine is not ready for it; exit code 3."""

    def __init__(self, results: Sequence[CheckResult], *, plan: Plan | None = None) -> None:
        """Keep what was found.

        Args:
            results: of all checks; one of them is an error.
            plan: what would start; None where the machine does not have it.
        """
        self.results = tuple(results)
        self.plan = plan
        self.errors = errors(results)
        more = f" (and {len(self.errors) - 1} more: see `gputrain check`)" if len(self.errors) > 1 else ""
        super().__init__(f"{self.errors[0].line}{more}")


def errors(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return what keeps a run from starting."""
    return tuple(result for result in results if result.status == "error")


def warnings(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return what may go wrong later."""
    return tuple(result for result in results if result.status == "warning")


def summary(results: Sequence[CheckResult]) -> str:
    """Say in a few words how it stands: ``2 errors, 1 warning``, or ``ready``."""
    counts = [(len(errors(results)), "error"), (len(warnings(results)), "warning")]
    said = [f"{count} {word}{'s' * (count != 1)}" for count, word in counts if count]
    return ", ".join(said) if said else "ready"
