"""Imported by the fork server: loads torch, which forked ranks then have in memory already.

Nothing here starts a thread, makes a tensor or touches CUDA: a process that did could not fork safely. The server
has OMP_NUM_THREADS=1 in its environment for the same reason; ranks set their threads themselves.
"""

from __future__ import annotations

import gc
import warnings

# A fifth of the import time would go to collecting garbage that there is not.
gc.disable()
with warnings.catch_warnings():
    # numpy is no dependency; torch says so at the first use of what would work without it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    import torch._dynamo  # DDP's constructor and the optimizers import it on first use
    import torch.nn.parallel.distributed  # noqa: F401

# Out of the collector's sight, pages with imported objects stay shared between the ranks.
gc.freeze()
gc.enable()
