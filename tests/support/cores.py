"""For how long cores were lacking: what a limit in seconds cannot be held to."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.host.cores import read_core_times


def stolen_s() -> float:
    """Return what the host has given to its other guests so far, in seconds of all cores together; 0 if unknown."""
    cores = read_core_times()
    return cores.stolen / os.sysconf("SC_CLK_TCK") if cores is not None else 0.0


def lacked_s() -> float:
    """Return ``stolen_s`` and for how long, so far, something here waited for a core, in seconds."""
    try:
        some = Path("/proc/pressure/cpu").read_text().split()[4]
    except OSError:  # a kernel that does not count it
        return stolen_s()
    return stolen_s() + int(some.removeprefix("total=")) * 1e-6
