"""The result of one preflight check: its severity, the recipe's key and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from gputrain_tui.plan.planner import Plan
from trainer.contract.errors import RequestError, listed

CheckStatus = Literal["ok", "note", "warning", "error"]
"""An error keeps a run from starting; a warning and a note do not."""


class CheckResult(msgspec.Struct, frozen=True):
    """The result of one check."""

    status: CheckStatus
    check: str
    """Subject of the check, in a word or two: ``data``, ``port``."""
    what: str
    """Observation, one line."""
    fix: str = ""
    """Remedy; empty where none is needed."""
    key: str = ""
    """The recipe's key, as ``--set`` takes it; empty for none."""
    where: str = ""
    """``FILE:LINE: KEY``; empty for no key."""
    host: str = ""
    """The machine; empty for this one."""

    @property
    def text(self) -> str:
        """Machine, observation and fix in one line."""
        finding = f"{self.host}: {self.what}" if self.host else self.what
        return f"{finding}{' or' if finding.endswith('?') else ';'} {self.fix}" if self.fix else finding

    @property
    def line(self) -> str:
        """Location, machine, observation and fix in one line."""
        return f"{self.where}: {self.text}" if self.where else self.text


class NotReadyError(RequestError):
    """The recipe is valid, but the machines are not ready for it; exit code 3."""

    def __init__(self, results: Sequence[CheckResult], *, plan: Plan | None = None) -> None:
        """Keep the results, at least one of which is an error; no plan if devices are missing."""
        self.results = tuple(results)
        self.plan = plan
        self.errors = errors(results)
        more = f" (and {len(self.errors) - 1} more: see `gputrain check`)" if len(self.errors) > 1 else ""
        super().__init__(f"{self.errors[0].line}{more}")


ok = partial(CheckResult, "ok")
warning = partial(CheckResult, "warning")
error = partial(CheckResult, "error")


def errors(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return the results that keep a run from starting."""
    return tuple(result for result in results if result.status == "error")


def warnings(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return the warnings: possible failures that do not keep a run from starting."""
    return tuple(result for result in results if result.status == "warning")


def summary(results: Sequence[CheckResult]) -> str:
    """Return the counts in words: ``2 errors, 1 warning``, or ``ready``."""
    counts = [(len(errors(results)), "error"), (len(warnings(results)), "warning")]
    parts = [f"{count} {word}{'s' * (count != 1)}" for count, word in counts if count]
    return ", ".join(parts) if parts else "ready"


def by_hosts(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results with those that differ in nothing but the host as one, which names all their hosts."""
    of_hosts: dict[CheckResult, list[str]] = {}
    for result in results:
        of_hosts.setdefault(msgspec.structs.replace(result, host=""), []).append(result.host)
    return [
        msgspec.structs.replace(
            result, host=hosts[0] if len(hosts) == 1 else listed([each or "this machine" for each in hosts])
        )
        for result, hosts in of_hosts.items()
    ]
