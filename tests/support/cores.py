"""Time without a free core: CPU time stolen by the host, and waits of processes for a core."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.host.cores import read_core_times


def stolen_s() -> float:
    """Return the CPU time stolen by the hypervisor since boot, summed over all cores, in seconds; 0 if unknown."""
    cores = read_core_times()
    return cores.stolen / os.sysconf("SC_CLK_TCK") if cores is not None else 0.0


def lacked_s() -> float:
    """Return ``stolen_s`` plus the time since boot in which a process waited for a core, in seconds."""
    try:
        total = Path("/proc/pressure/cpu").read_text().split()[4]
    except OSError:  # a kernel without pressure stall information
        return stolen_s()
    return stolen_s() + int(total.removeprefix("total=")) * 1e-6
