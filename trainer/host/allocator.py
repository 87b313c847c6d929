"""Settings of glibc's malloc that keep freed memory in the process.

By default a step's large blocks go back to the kernel, and are faulted in again at the next step.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables with which a user configures malloc or replaces it."""


def keep_freed_memory() -> bool:
    """Raise both thresholds of glibc's malloc, unless a user has configured it; return whether they were raised."""
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    trim_bytes = 1 << 29  # free memory kept at the end of the heap: more than the temporaries of a step on CPU ranks
    mmap_bytes = 1 << 25  # size from which a block gets its own mapping; the maximum that glibc allows
    return bool(mallopt(M_MMAP_THRESHOLD, mmap_bytes)) and bool(mallopt(M_TRIM_THRESHOLD, trim_bytes))
