"""The task ``lm`` under a limit of memory for each rank."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path

import torch._dynamo  # DDP imports it, and FSDP the other one, after the limit is set
import torch.distributed.fsdp
from torch import nn

from trainer.contract.task_options import LmOptions
from trainer.tasks.lm import LanguageModel

M_ARENA_MAX = -8
"""Parameter of mallopt(3)."""


def count_threads_little() -> None:
    """Make the threads begun from here on take 1 MiB of the limit each in place of 8, and allocate from one heap.

    How many threads there are at once differs between machines and runs.
    """
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)  # of pthread_attr_t, 56 on x86-64
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 20))
    assert libc.pthread_setattr_default_np(attributes) == 0
    assert libc.mallopt(M_ARENA_MAX, 1) == 1


class LimitedOptions(LmOptions, kw_only=True, forbid_unknown_fields=True):
    limit_mib: int = 0
    """Memory that a rank may take from when it builds its model on, MiB; 0: no limit."""
    own_group: str = ""
    """Cgroup that a rank joins when it builds its model: its path without the rank at the end."""


class LimitedLm(LanguageModel):
    Options = LimitedOptions
    options: LimitedOptions

    def model(self) -> nn.Module:
        if self.options.own_group:
            rank = torch.distributed.get_rank()
            Path(f"{self.options.own_group}{rank}", "cgroup.procs").write_text(str(os.getpid()))
            time.sleep(2.0)  # the node agent looks at its ranks' groups once a second, and tells nobody
        if self.options.limit_mib:
            count_threads_little()
            status = Path("/proc/self/status").read_text()
            (used,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
            limit = used + (self.options.limit_mib << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return super().model()
