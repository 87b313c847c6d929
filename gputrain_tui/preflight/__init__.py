"""Checks a run for causes of failure before anything starts; each result has the recipe's key and a fix.

``collect_facts`` reads this machine in a few milliseconds, ``run_checks`` is pure; ``gputrain check``, ``gputrain run``
and the console's form show the same results.
"""

from __future__ import annotations

from gputrain_tui.preflight.checks import run_checks
from gputrain_tui.preflight.collect import collect_facts
from gputrain_tui.preflight.facts import PreflightFacts
from gputrain_tui.preflight.result import CheckResult, NotReadyError, errors, summary, warnings

__all__ = [
    "CheckResult",
    "NotReadyError",
    "PreflightFacts",
    "collect_facts",
    "errors",
    "run_checks",
    "summary",
    "warnings",
]
