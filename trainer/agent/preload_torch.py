"""Import of the fork server that loads torch, so that forked ranks have it in memory.

Starts no thread, makes no tensor and does not touch CUDA: a process that did could not fork safely. The server has
OMP_NUM_THREADS=1 in its environment for the same reason; ranks set their threads themselves.
"""

from __future__ import annotations

import gc
import warnings

# Garbage collection would take a fifth of the import time and find nothing.
gc.disable()
with warnings.catch_warnings():
    # numpy is no dependency; torch warns of that at the first use.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    import torch.nn.parallel.distributed  # noqa: F401

# The collector skips frozen objects, so their memory pages stay shared between the ranks.
gc.freeze()
gc.enable()
