"""DDP's buckets are the same from the first step on, so that a resumed training repeats the sums bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loop_on_ranks import train_on
from numeric_tasks import wide_points
from rank_group import Gang
from torch import nn

from trainer.checkpoint import load, step_name

OPTIONS = {"batch_size": (4,), "optimizer": "sgd", "lr": (0.01,), "max_epochs": 1}


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Gang]:
    gang = Gang(3)
    yield gang
    gang.close()


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 0.02])
def test_three_ranks_resume_bit_for_bit(three_ranks: Gang, tmp_path: Path, bucket_cap_mb: float) -> None:
    options = {**OPTIONS, "bucket_cap_mb": bucket_cap_mb}
    task = "numeric_tasks:WideRegression"
    whole = three_ranks.run(train_on, task, None, {**options, "save": False})[0]
    assert whole["updates"] == 12
    for step in (1, 5):
        folder = tmp_path / str(step)
        folder.mkdir()
        three_ranks.run(train_on, task, str(folder), {**options, "max_updates": step})
        rest = {**options, "save": False, "resume": str(folder / step_name(step))}
        resumed = three_ranks.run(train_on, task, None, rest)[0]
        assert resumed["error"] == ""
        for name, value in whole["model"].items():
            assert torch.equal(resumed["model"][name], value), f"{name} after resuming at step {step}"


def test_the_steps_of_three_ranks_are_those_of_one_process_by_hand(three_ranks: Gang, tmp_path: Path) -> None:
    options = {**OPTIONS, "shuffle": False, "max_updates": 3}
    three_ranks.run(train_on, "numeric_tasks:WideRegression", str(tmp_path), options)
    saved = load(tmp_path / step_name(3))["model"]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))
    inputs, targets = wide_points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for begin in (0, 12, 24):
        part = slice(begin, begin + 12)
        optimizer.zero_grad()
        (model(inputs[part])[:, 0] - targets[part]).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "value", "word"), [("ddp_comm_hook", "powersgd", "powersgd"), ("static_graph", True, "--static-graph")]
)
def test_a_resume_that_differs_in_the_last_bits_is_said_to(
    three_ranks: Gang, tmp_path: Path, option: str, value: object, word: str
) -> None:
    if value == "powersgd":
        pytest.importorskip("numpy")
    options = {**OPTIONS, option: value, "max_updates": 3}
    first = three_ranks.run(train_on, "numeric_tasks:WideRegression", str(tmp_path), options)[0]
    assert first["error"] == ""
    rest = {**options, "save": False, "max_updates": 4, "resume": str(tmp_path / step_name(3))}
    resumed = three_ranks.run(train_on, "numeric_tasks:WideRegression", None, rest)[0]
    assert resumed["error"] == ""
    assert any(word in line and "differ" in line for line in resumed["narration"])
