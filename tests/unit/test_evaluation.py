"""Evaluation of a split by a task of a user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn
from worker_contexts import worker_context

from trainer.contract.errors import TrainingError
from trainer.contract.record import Validation
from trainer.contract.record.json_lines import encode_event
from trainer.data.batches import EvalBatches
from trainer.engine.evaluation import Evaluation, evaluate


class UncountedTask(TinyTask):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        loss, _, metrics = super().loss(model, batch)
        return loss, 0, metrics


class TensorMetricTask(TinyTask):
    def metrics(self, totals: Mapping[str, float], count: float) -> Any:
        return {"accuracy": torch.tensor(totals["accuracy"]) / count}


def evaluation_of(kind: type[TinyTask]) -> Evaluation | None:
    task = kind(TinyOptions(valid_samples=3))
    batches = EvalBatches(
        task.datasets()["valid"], collate=task.collate, batch_sizes=(2,), rank=0, split="valid", num_workers=0
    )
    return evaluate(task, task.model(), batches, worker_context(), nullcontext())


def test_a_split_without_an_item_is_a_failure_with_a_message() -> None:
    with pytest.raises(TrainingError, match="returned a count of 0"):
        evaluation_of(UncountedTask)


def test_a_metric_that_the_task_gives_as_a_tensor_is_a_number_in_the_record() -> None:
    found = evaluation_of(TensorMetricTask)
    assert found is not None
    event = Validation(time=0.0, step=1, epoch=1, split="valid", loss=found.loss, metrics=found.metrics)
    assert json.loads(encode_event(event))["metrics"] == {"accuracy": found.metrics["accuracy"]}
