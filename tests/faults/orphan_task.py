"""A task of a user's own whose data leaves orphans, and a child whose exit code it reads at the end."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.dataset import SizedDataset
from trainer.tasks.task import Task

ORPHANS = 150


class OrphanTask(Task):
    count_per_sample = 1

    def datasets(self) -> Mapping[str, SizedDataset]:
        folder = Path(os.environ["GPUTRAIN_RUN"])
        own = subprocess.Popen(["sh", "-c", "exit 7"])
        failed = sum(os.system("true &") != 0 for _ in range(ORPHANS))
        (folder / "made").write_text(str(failed))
        while not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "child").write_text(str(own.wait()))
        return {"train": [torch.ones(4)] * 8}

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        return model(batch).square().sum(), len(batch), {}
