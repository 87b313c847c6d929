"""The task ``lm`` under a limit of memory for each rank."""

from __future__ import annotations

import resource
from pathlib import Path

import torch._dynamo  # DDP imports it, and FSDP the other one, after the limit is set
import torch.distributed.fsdp  # noqa: F401
from torch import nn

from trainer.contract.task_options import LmOptions
from trainer.tasks.lm import LanguageModel


class LimitedOptions(LmOptions, kw_only=True, forbid_unknown_fields=True):
    limit_mib: int = 0
    """Memory that a rank may take from when it builds its model on, MiB; 0: no limit."""
    double: bool = False


class LimitedLm(LanguageModel):
    Options = LimitedOptions
    options: LimitedOptions

    def model(self) -> nn.Module:
        if self.options.limit_mib:
            status = Path("/proc/self/status").read_text()
            (used,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
            limit = used + (self.options.limit_mib << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        model = super().model()
        return model.double() if self.options.double else model
