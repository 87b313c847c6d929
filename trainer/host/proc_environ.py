"""Run directory of a process, from its environment in ``/proc/PID/environ``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.host.processes import environ_value

RUN = "GPUTRAIN_RUN"
"""Environment variable of every process of a run that the console started: its run directory."""
SUPERVISOR = "GPUTRAIN_SUPERVISOR"
"""Environment variable of the supervisor of a run: its run directory."""


def run_of(pid: int, names: Sequence[str] = (SUPERVISOR, RUN)) -> str | None:
    """Return the run directory that the first of these variables in a process's environment names; None without one."""
    for name in names:
        value = environ_value(pid, name)
        if value is not None and value.startswith(b"/"):
            return os.fsdecode(value)
    return None


def is_same_directory(first: str, second: str) -> bool:
    """Whether two paths name the same directory, which may be deleted."""
    return first == second or os.path.realpath(first) == os.path.realpath(second)
