"""Keeps freed memory in the process: glibc's defaults give a step's large blocks back, and fault them in again."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
TRIM_BYTES = 1 << 29
"""Free memory at the heap's end that stays: more than the temporaries of a step on CPU ranks."""
MMAP_BYTES = 1 << 25
"""Size from which a block is mapped on its own; glibc allows no more."""
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables by which a user has chosen."""


def keep_freed_memory() -> bool:
    """Raise both thresholds of glibc's malloc; return whether it was done, which is not where a user has chosen."""
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES))
