"""Evaluation of a split by a task of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn

from trainer.contract.errors import TrainingError
from trainer.data.batches import EvalBatches
from trainer.engine.evaluation import evaluate


class UncountedTask(TinyTask):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        loss, _, metrics = super().loss(model, batch)
        return loss, 0, metrics


def test_a_split_without_an_item_is_a_failure_with_a_message() -> None:
    task = UncountedTask(TinyOptions(valid_samples=3))
    batches = EvalBatches(
        task.datasets()["valid"], collate=task.collate, batch_sizes=(2,), rank=0, split="valid", num_workers=0
    )
    with pytest.raises(TrainingError, match="returned a count of 0"):
        evaluate(
            task,
            task.model(),
            batches,
            device=torch.device("cpu"),
            autocast=nullcontext(),
            stop_requested=lambda: False,
            before_wait=lambda: None,
        )
