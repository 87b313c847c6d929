"""What would go wrong with a run, found before anything starts: each result with the key it concerns and its fix.

``look`` reads this machine in a few milliseconds, ``judge`` is pure; ``gputrain check``, ``gputrain run`` and the
console's form show the same results.
"""

from __future__ import annotations

from gputrain_tui.preflight.facts import Facts
from gputrain_tui.preflight.judge import judge
from gputrain_tui.preflight.look import look
from gputrain_tui.preflight.result import NotReadyError, Result, errors, summary, warnings

__all__ = ["Facts", "NotReadyError", "Result", "errors", "judge", "look", "summary", "warnings"]
