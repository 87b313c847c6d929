"""Built-in tasks whose models compute in float64, with batches in the order of the file."""

from __future__ import annotations

from torch import nn

from trainer.tasks.docnn import DocNNTask
from trainer.tasks.lm import LanguageModel


class DoubleDocNN(DocNNTask):
    def model(self) -> nn.Module:
        return super().model().double()

    def lengths(self, split: str) -> None:  # type: ignore[override]
        return None


class DoubleLanguageModel(LanguageModel):
    def model(self) -> nn.Module:
        return super().model().double()
