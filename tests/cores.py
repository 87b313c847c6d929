"""For how long cores were lacking: what a limit in seconds cannot be held to."""

from __future__ import annotations

import os
from pathlib import Path


def stolen_s() -> float:
    """Return what the host has given to its other guests so far, in seconds of all cores together; 0 if not told."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def lacked_s() -> float:
    """Return ``stolen_s`` and for how long, so far, something here waited for a core, in seconds."""
    try:
        some = Path("/proc/pressure/cpu").read_text().split()[4]
    except OSError:  # a kernel that does not count it
        return stolen_s()
    return stolen_s() + int(some.removeprefix("total=")) * 1e-6
