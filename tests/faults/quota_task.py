"""A task of which ranks join a cgroup of the test, as where an administrator limits them while they run."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from fault_task import FaultOptions, FaultTask
from torch import nn


class QuotaOptions(FaultOptions, kw_only=True, forbid_unknown_fields=True):
    cgroup: str
    """Folder of the cgroup that some ranks join."""
    held: list[int]
    """These ranks."""


class QuotaTask(FaultTask):
    Options = QuotaOptions
    options: QuotaOptions

    def model(self) -> nn.Module:
        if dist.get_rank() in self.options.held:
            Path(self.options.cgroup, "cgroup.procs").write_text(str(os.getpid()))
        return super().model()
