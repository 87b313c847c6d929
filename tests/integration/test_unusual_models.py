"""Models and optimizers that a training must take exactly, or refuse in one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_on_ranks import train_on
from numeric_tasks import points, sentences
from rank_group import Gang
from torch import nn
from torch.utils.data import TensorDataset
from trained import train, train_spawned

OPTIONS = {"batch_size": (4,), "optimizer": "sgd", "lr": (0.05,), "shuffle": False, "max_epochs": 2, "save": False}


def one_rank(task: str, **options: Any) -> dict[str, Any]:
    return train_on(0, 1, f"numeric_tasks:{task}", None, {**OPTIONS, **options})


def words_by_hand(kind: Any, *, clip_norm: float, samples: int = 24, batch: int = 8) -> dict[str, torch.Tensor]:
    """Train the same model with dense gradients, which are the sums of the sparse ones."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 6), nn.Flatten(), nn.Linear(30, 1)).double()
    words, targets = sentences(samples)
    optimizer = kind(model.parameters())
    for _ in range(2):
        for begin in range(0, samples, batch):
            part = slice(begin, begin + batch)
            optimizer.zero_grad()
            (model(words[part])[:, 0] - targets[part]).square().mean().backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", partial(torch.optim.SGD, lr=0.05)), ("adagrad", partial(torch.optim.Adagrad, lr=0.05, eps=1e-8))],
)
def test_sparse_gradients_of_an_embedding_train_as_dense_ones_do(
    two_ranks: Gang, name: str, kind: Any, clip_norm: float
) -> None:
    expected = words_by_hand(kind, clip_norm=clip_norm)
    options = {**OPTIONS, "optimizer": name, "clip_norm": clip_norm}
    alone = one_rank("SparseWords", **{**options, "batch_size": (8,)})
    both = two_ranks.run(train_on, "numeric_tasks:SparseWords", None, options)
    for done in (alone, *both):
        assert done["error"] == ""
        for key, value in expected.items():
            torch.testing.assert_close(done["model"][key], value, rtol=0, atol=1e-9)


def test_sparse_gradients_are_reduced_and_measured_where_a_run_is_recorded(tmp_path: Path) -> None:
    expected = words_by_hand(partial(torch.optim.SGD, lr=0.05), clip_norm=0.0)
    task = f"{Path(__file__).parents[1] / 'support/numeric_tasks.py'}:SparseWords"
    flags = ("--task", task, "--batch-size", 4, "--optimizer", "sgd", "--lr", 0.05, "--max-epochs", 2)
    done = train_spawned(tmp_path, *flags, "--no-shuffle", "--sync-detail-every", 1, ranks=2)
    assert done.code == 0, done.output
    assert [event["message"] for event in done.events_of("finding") if event["kind"] == "not_measured"] == []
    measured = [event for event in done.events_of("step") if "sync_bytes" in event]
    assert {event["rank"] for event in measured} == {0, 1}
    assert all(event["sync_bytes"] > 0 for event in measured)
    by_hand = torch.cat([tensor.flatten() for tensor in expected.values()])
    torch.testing.assert_close(done.parameters, by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"optimizer": "adadelta"}, {"weight_decay": 0.1}])
def test_an_optimizer_that_takes_no_sparse_gradients_is_refused_with_others_that_do(options: dict[str, Any]) -> None:
    done = one_rank("SparseWords", **options)
    assert "takes no sparse gradients" in done["error"]
    assert "sgd or adagrad" in done["error"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("DatasetAlone", "RecordingTask.datasets() returned a TensorDataset, but must return a dict of datasets"),
        ("MisnamedSplit", "RecordingTask.datasets() returned the split 'val', but splits are train, valid and test"),
        ("LoaderAsSplit", "RecordingTask.datasets() returned a DataLoader as train: return its dataset; --batch-size"),
        ("NoModule", "the task's model() returned a NoneType, but must return a torch.nn.Module"),
        ("ForeignOptimizer", "the task's optimizer holds no parameter of the model, so that nothing would be trained"),
        ("TextAsMetric", "RecordingTask.metrics() returned {'quality': 'high'}, but must return a dict of numbers"),
    ],
)
def test_a_mistake_in_a_task_is_one_line(task: str, message: str) -> None:
    done = train_on(0, 1, f"refused_tasks:{task}", None, {"batch_size": (4,), "max_epochs": 1, "save": False})
    assert done["error"].startswith(message)


@pytest.mark.parametrize(("task", "is_told"), [("MeanAsMetric", True), ("MeanByHand", False)])
def test_a_metric_that_is_a_mean_is_named(task: str, is_told: bool) -> None:
    done = train_on(0, 1, f"refused_tasks:{task}", None, {"batch_size": (4,), "max_epochs": 1, "save": False})
    assert done["error"] == ""
    assert any(line.startswith("loss() seems to return the mean of mae:") for line in done["narration"]) is is_told


def test_a_task_that_exits_has_not_trained(tmp_path: Path) -> None:
    task = f"{Path(__file__).parents[1] / 'support/refused_tasks.py'}:Exiting"
    done = train(tmp_path, "--task", task, "--max-updates", 2)
    assert (done.code, [event["message"] for event in done.events_of("failure")]) == (1, ["SystemExit: 0"])
    assert "in datasets\n    raise SystemExit(0)" in (tmp_path / "logs/0.log").read_text()


@pytest.mark.parametrize("when", ["", "training"])
def test_a_parameter_that_forward_makes_is_refused_at_once(when: str) -> None:
    done = one_rank("LateParameter", task_options={"fault": when})
    assert done["error"].startswith("the model makes late in its forward pass, where no optimizer knows it")


def test_unused_parameters_are_named_with_the_flag_on_several_ranks(two_ranks: Gang) -> None:
    for done in two_ranks.run(train_on, "numeric_tasks:Unused", None, OPTIONS):
        assert done["error"] == (
            "step 1 does not use pooler.weight, pooler.bias, whose gradient the ranks wait for: give "
            "--find-unused-parameters, or freeze it with requires_grad_(False)"
        )


def test_parameters_that_a_later_step_does_not_use_are_named_too() -> None:
    gang = Gang(2)
    options = {**OPTIONS, "task_options": {"fault": "late"}}
    try:
        for done in gang.run(train_on, "numeric_tasks:Unused", None, options):
            assert done["error"].startswith("step 2 does not use pooler.weight, pooler.bias")
    finally:
        gang.close()


def test_unused_parameters_are_trained_around_with_the_flag_or_on_one_rank() -> None:
    gang = Gang(2)
    options = {**OPTIONS, "find_unused_parameters": True}
    try:
        both = gang.run(train_on, "numeric_tasks:Unused", None, options)[0]
    finally:
        gang.close()
    alone = one_rank("Unused", batch_size=(8,))
    torch.manual_seed(1)
    body = nn.Linear(4, 1).double()
    inputs, targets = points(24)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.05)
    data = TensorDataset(inputs, targets)
    for _ in range(2):
        for begin in range(0, 24, 8):
            optimizer.zero_grad()
            rows, wanted = data[begin : begin + 8]
            (body(rows)[:, 0] - wanted).square().mean().backward()
            optimizer.step()
    for done in (both, alone):
        assert done["error"] == ""
        torch.testing.assert_close(done["model"]["body.weight"], body.weight.detach(), rtol=0, atol=1e-14)
    assert any(line.startswith("step 1 does not use pooler.weight, pooler.bias:") for line in alone["narration"])


IDLE = "the gradient of pooler.weight, pooler.bias was zero or absent in 20 steps: nothing trains it"


@pytest.mark.parametrize(
    ("fault", "options", "told"),
    [
        ("", {"find_unused_parameters": True}, True),
        ("zero", {}, True),
        ("late", {"find_unused_parameters": True}, False),
        ("zero", {"max_updates": 19}, False),
    ],
)
def test_a_layer_that_never_has_a_gradient_is_told_once(
    two_ranks: Gang, fault: str, options: dict[str, Any], told: bool
) -> None:
    options = {**OPTIONS, "max_epochs": 8, "batch_size": (4,), "task_options": {"fault": fault}, **options}
    both = two_ranks.run(train_on, "numeric_tasks:Unused", None, options)
    assert [done["error"] for done in both] == ["", ""]
    assert [line for line in both[0]["narration"] if "zero or absent" in line] == [IDLE] * told
    alone = one_rank("Unused", **{**options, "batch_size": (8,)})
    # On one rank one that takes no part in a step is told at the first step, and is not told again.
    assert [line for line in alone["narration"] if "zero or absent" in line] == [IDLE] * (told and fault == "zero")


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("LazyTask", {}, "the model is a LazyLinear, whose parameters have no shape before its first batch"),
        (
            "Unused",
            {"precision": "bf16"},
            "--precision is bf16, but the parameters of the model are float64, which auto",
        ),
        ("LbfgsTask", {}, "the task's optimizer is LBFGS, whose step computes the loss several times"),
        ("OwnOptimizer", {}, "--optimizer does nothing beside the task's own optimizer, RMSprop: leave it out"),
        (
            "OwnOptimizer",
            {"optimizer": "adamw", "weight_decay": 0.1},
            "--weight-decay does nothing beside the task's own",
        ),
        (
            "OwnOptimizer",
            {"optimizer": "adamw"},
            "--lr 0.05 does nothing beside the task's own optimizer, RMSprop, whose",
        ),
        ("InputGradient", {}, "loss() computes a gradient in a validation, which records none"),
        ("InputGradient", {"valid_every_epochs": 2}, "`with torch.enable_grad():`"),
    ],
)
def test_what_the_loop_cannot_train_is_one_line_with_the_remedy(
    task: str, options: dict[str, Any], message: str
) -> None:
    done = one_rank(task, **options)
    assert message in done["error"]
    assert "\n" not in done["error"]


@pytest.mark.parametrize("lr", [(0.001,), (0.02,), (0.02, 0.01)])
def test_a_learning_rate_of_the_tasks_own_optimizer_is_taken(lr: tuple[float, ...]) -> None:
    assert one_rank("OwnOptimizer", optimizer="adamw", lr=lr)["error"] == ""


def test_a_gradient_in_a_validation_can_be_enabled_by_the_task() -> None:
    assert one_rank("InputGradient", task_options={"fault": "enabled"})["error"] == ""


def test_an_unknown_best_metric_is_refused_before_the_first_step_with_the_nearest() -> None:
    done = train_on(0, 1, "numeric_tasks:TwoMetrics", None, {"best_metric": "acuracy", "save": False})
    assert done["error"].startswith("--best-metric acuracy: the task has no such metric, but loss, accuracy, error")
    assert "did you mean 'accuracy'" in done["error"]
    assert not any("valid" in line for line in done["narration"])


@pytest.mark.parametrize(("every_epochs", "validations"), [(0, 0), (1, 2), (2, 1), (3, 1)])
def test_a_validation_that_is_disabled_is_not_made_at_the_end_either(every_epochs: int, validations: int) -> None:
    done = one_rank("Regression", valid_every_epochs=every_epochs)
    assert done["error"] == ""
    assert sum(line.startswith("valid ") for line in done["narration"]) == validations


def test_random_numbers_that_no_checkpoint_keeps_are_told_once_and_more_urgently_after_a_resume(tmp_path: Path) -> None:
    task = f"{Path(__file__).parents[1] / 'support/numeric_tasks.py'}:OwnGenerator"
    flags = ("--task", task, "--batch-size", 4, "--save-every-updates", 2, "--lr", 0.01)

    def told(*more: object) -> list[tuple[str, str]]:
        done = train(tmp_path / str(len(more)), *flags, *more)
        assert done.code == 0, done.output
        return [
            (e["kind"], e.get("severity", "warning")) for e in done.events_of("finding") if e["kind"] == "not_resumed"
        ]

    assert told("--max-updates", 6) == [("not_resumed", "info")]
    saved = sorted((tmp_path / "2/checkpoints").glob("step_*.pt"))[-1]
    assert told("--max-updates", 8, "--resume", saved) == [("not_resumed", "warning")]
