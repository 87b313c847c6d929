"""Language model that stops after a number of updates until a file exists, or leaves the cores free."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.tasks.lm import LanguageModel, LmOptions


class GatedOptions(LmOptions, kw_only=True):
    gate: str = ""
    """File that lets the training continue."""
    updates: int = 0
    """Number of updates that do not need the file."""
    pause_s: float = 0.0
    """Least time of a training step."""


class GatedTask(LanguageModel):
    Options = GatedOptions
    options: GatedOptions
    begun = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        if model.training:
            time.sleep(self.options.pause_s)
            while self.begun >= self.options.updates and not Path(self.options.gate).exists():
                time.sleep(0.005)
            self.begun += 1
        return super().loss(model, batch)
