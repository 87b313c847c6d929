"""The language model, which trains no further than an update while a file is missing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.tasks.lm import LanguageModel, LmOptions


class GatedOptions(LmOptions, kw_only=True):
    gate: str = ""
    """The file that lets the training go on."""
    updates: int = 0
    """How many of them need no file."""


class GatedTask(LanguageModel):
    Options = GatedOptions
    options: GatedOptions
    begun = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, Mapping[str, Tensor]]:
        if model.training:
            while self.begun >= self.options.updates and not Path(self.options.gate).exists():
                time.sleep(0.005)
            self.begun += 1
        return super().loss(model, batch)
