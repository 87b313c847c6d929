"""The unit of a loss is shown where the task names one, and nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SQUARED = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from trainer.tasks.task import Task

class Line(Task):
    count_per_sample = 1

    def datasets(self):
        x = torch.arange(64.0)[:, None] / 64
        return {"train": TensorDataset(x, 2 * x), "valid": TensorDataset(x, 2 * x)}

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])
"""


@pytest.mark.parametrize("unit", ["", "nats"])
def test_a_loss_is_in_nats_only_where_the_task_says_so(tmp_path: Path, unit: str) -> None:
    named = (
        SQUARED if not unit else SQUARED.replace("count_per_sample = 1", f"count_per_sample = 1; loss_unit = {unit!r}")
    )
    (tmp_path / "line.py").write_text(named)
    words = ["--task", "line.py:Line", "--cpu", "--max-updates", "4", "--log-interval", "1", "--run-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert "valid at step 4: loss " in printed
    assert ("nats" in printed) == bool(unit)
    events = [json.loads(line) for line in (tmp_path / "run" / "events" / "0.ndjson").read_text().splitlines()]
    (plan,) = [event for event in events if event["type"] == "training_plan"]
    assert plan.get("loss_unit", "") == unit
