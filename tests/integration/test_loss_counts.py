"""The count of a loss: compared with ``count_per_sample`` at each step, and a mean in place of a sum is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_on_ranks import train_on
from numeric_tasks import points
from rank_group import Gang
from torch import nn

GROUP = {"batch_size": (4,), "optimizer": "sgd", "lr": (0.05,), "shuffle": False, "max_epochs": 2, "save": False}


def one_rank(task: str, **options: Any) -> dict[str, Any]:
    return train_on(0, 1, f"numeric_tasks:{task}", None, {**GROUP, **options})


def reference(model: nn.Module, *, samples: int, batch: int, epochs: int) -> dict[str, torch.Tensor]:
    """Plain gradient descent on the mean over each batch."""
    inputs, targets = points(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for begin in range(0, samples, batch):
            part = slice(begin, begin + batch)
            optimizer.zero_grad()
            (model(inputs[part])[:, 0] - targets[part]).square().mean().backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def same_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1).double()


def test_a_sum_gives_the_steps_of_a_loop_written_by_hand(two_ranks: Gang) -> None:
    expected = reference(same_model(), samples=24, batch=8, epochs=2)
    alone = one_rank("Regression", batch_size=(8,))
    both = two_ranks.run(train_on, "numeric_tasks:Regression", None, GROUP)[0]
    for done in (alone, both):
        assert done["error"] == ""
        for name, value in expected.items():
            torch.testing.assert_close(done["model"][name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("fault", ["", "tensor", "late"])
def test_a_count_unlike_count_per_sample_is_refused_before_its_step(two_ranks: Gang, fault: str) -> None:
    step = 3 if fault == "late" else 1
    options = {**GROUP, "task_options": {"fault": fault}}
    both = two_ranks.run(train_on, "numeric_tasks:WrongCount", None, options)
    for done in (one_rank("WrongCount", **options), *both):
        assert done["error"].startswith(
            f"step {step}: RecordingTask.loss() counts 40 items in 4 samples, but count_per_sample = 1 makes them 4"
        )
        assert "count_per_sample = None" in done["error"]


@pytest.mark.parametrize("task", ["MeanLoss", "PoppingMeanLoss", "NoisyMeanLoss"])
def test_a_mean_in_place_of_a_sum_is_refused_before_the_first_step(task: str) -> None:
    done = one_rank(task)
    assert "loss() returns a mean, but must return a sum" in done["error"]
    assert 'reduction="sum"' in done["error"]


def test_all_ranks_refuse_a_mean_alike(two_ranks: Gang) -> None:
    errors = {done["error"] for done in two_ranks.run(train_on, "numeric_tasks:MeanLoss", None, GROUP)}
    assert len(errors) == 1
    assert "returns a mean" in errors.pop()


@pytest.mark.parametrize("task", ["MeanLossOfBatches", "UncheckedMeanLoss", "OnlyPairs"])
def test_a_task_that_opts_out_or_counts_batches_or_takes_no_single_sample_is_trained(task: str) -> None:
    done = one_rank(task)
    assert (done["error"], done["updates"]) == ("", 12)
    assert any("loss of one sample" in line for line in done["narration"]) == (task == "OnlyPairs")


def test_the_check_changes_no_random_number_of_the_training() -> None:
    """The dropout of a training is that of one without the check."""
    options = {"task_options": {"dropout": 0.5}, "batch_size": (5,), "max_epochs": 2, "save": False}
    checked = train_on(0, 1, "tiny_task:TinyTask", None, options)
    plain = train_on(0, 1, "tiny_task:UncheckedTinyTask", None, options)
    for name, value in plain["model"].items():
        assert torch.equal(checked["model"][name], value)
