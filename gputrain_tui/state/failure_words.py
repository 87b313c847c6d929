"""The kind of a failure in words."""

from __future__ import annotations

import re

from trainer.contract.record import Failure

SIGNAL = re.compile(r"\bSIG[A-Z0-9]+\b|\bsignal \d+\b")


def failure_words(failure: Failure) -> str:
    """Return the kind of a failure in words, such as ``out of memory``; of a signal with its name."""
    if failure.kind == "signal":
        found = SIGNAL.search(failure.message)
        return f"killed ({found[0]})" if found else "killed"
    return "exited" if failure.kind == "exit" else failure.kind.replace("_", " ")
