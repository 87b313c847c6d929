"""Groups of parameters by a task's hook, weight decay and kind of optimizer; Muon against torch's own classes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.engine.ema import WeightAverage
from trainer.engine.optimizers import restore, training_optimizer, without_optimizer
from trainer.engine.parameter_groups import parameter_groups
from trainer.tasks.task import NoOptions, Task

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")


class Model(nn.Module):
    """One of each kind: an embedding, a matrix, a bias, a norm, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.hidden(self.embedding(rows)).tanh()))
        return output


class GroupTask(Task):
    def __init__(self, groups: Any = ()) -> None:
        super().__init__(NoOptions())
        self.groups = groups

    def parameter_groups(self, model: nn.Module) -> Any:
        return self.groups(model) if callable(self.groups) else self.groups


def made(options: Training, groups: Any = ()) -> list[tuple[set[str], dict[str, Any]]]:
    """Return the groups by the names of their parameters."""
    model = Model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        ({names[id(parameter)] for parameter in group["params"]}, {k: v for k, v in group.items() if k != "params"})
        for group in parameter_groups(GroupTask(groups), model, options)
    ]


VECTORS = {"hidden.bias", "norm.weight", "norm.bias"}


def test_without_a_hook_all_are_in_one_group() -> None:
    [(names, settings)] = made(Training(lr=(0.1,), weight_decay=0.5))
    assert names == VECTORS | {"embedding.weight", "hidden.weight", "head.weight"}
    assert settings == {"lr": 0.1, "weight_decay": 0.5}
    assert len(training_optimizer(GroupTask(), Model(), Training(weight_decay=0.5)).param_groups) == 1


def test_biases_and_norms_may_have_no_decay() -> None:
    decayed, others = made(Training(lr=(0.1,), weight_decay=0.5, decay_norms=False))
    assert decayed == ({"embedding.weight", "hidden.weight", "head.weight"}, {"lr": 0.1, "weight_decay": 0.5})
    assert others == (VECTORS, {"lr": 0.1, "weight_decay": 0.0})


def test_a_task_scales_rates_and_sets_decays_of_its_groups() -> None:
    def groups(model: Model) -> Sequence[Any]:
        return [
            {"params": model.head.parameters(), "lr_scale": 0.1},
            {"params": [model.frozen, model.norm.weight], "weight_decay": 0.2},
        ]

    head, norm, rest, vectors = made(Training(lr=(0.5,), weight_decay=0.1, decay_norms=False), groups)
    assert head == ({"head.weight"}, {"lr": pytest.approx(0.05), "weight_decay": 0.1})
    assert norm == ({"norm.weight"}, {"lr": 0.5, "weight_decay": 0.2})  # its own decay, though it is a norm
    assert rest == ({"embedding.weight", "hidden.weight"}, {"lr": 0.5, "weight_decay": 0.1})
    assert vectors == ({"hidden.bias", "norm.bias"}, {"lr": 0.5, "weight_decay": 0.0})


def test_muon_gets_matrices_that_are_no_embedding_and_none_that_the_task_keeps() -> None:
    def groups(model: Model) -> Sequence[Any]:
        return [{"params": model.head.parameters(), "muon": False}]

    kinds = {name: settings["muon"] for names, settings in made(Training(optimizer="muon"), groups) for name in names}
    assert kinds == {"hidden.weight": True, "embedding.weight": False, "head.weight": False} | dict.fromkeys(
        VECTORS, False
    )


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (3, "returned a int; it must return a list of dicts"),
        ([{"lr_scale": 2}], "returned at 0 no dict with params"),
        (lambda model: [{"params": [model.head.weight], "lr_scales": 2}], "the key 'lr_scales' at 0; did"),
        (lambda model: [{"params": [model.head.weight], "lr_scale": -1}], "returned lr_scale -1 at 0"),
        (lambda model: [{"params": [nn.Parameter(torch.ones(1))]}], "with one that is not the model's"),
        (lambda model: [{"params": [model.head.weight]}] * 2, "returned head.weight twice"),
    ],
)  # fmt: skip
def test_what_a_hook_may_not_return_is_refused(groups: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        parameter_groups(GroupTask(groups), Model(), Training())
    assert str(refused.value).startswith("GroupTask.parameter_groups() ")
    assert "\n" not in str(refused.value)


def test_parameters_that_the_tasks_own_optimizer_leaves_out_are_named() -> None:
    model = Model()
    assert without_optimizer(torch.optim.SGD(model.parameters(), 0.1), model) == ""
    partial = torch.optim.SGD([p for name, p in model.named_parameters() if not name.startswith("norm")], 0.1)
    text = "no group of the optimizer holds norm.weight, norm.bias: they keep their first values"
    assert without_optimizer(partial, model) == text


# ------------------------------------------------------------------------------------------------------------ Muon


def train(model: Model, optimizers: Sequence[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.tensor([step % 5, 1])).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@needs_muon
def test_muon_moves_each_parameter_as_torchs_own_classes_do() -> None:
    options = Training(optimizer="muon", lr=(0.02,), weight_decay=0.1, decay_norms=False)
    torch.manual_seed(0)
    ours = Model()
    theirs = copy.deepcopy(ours)
    matrices = [theirs.hidden.weight, theirs.head.weight]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    vectors = [theirs.hidden.bias, theirs.norm.weight, theirs.norm.bias]
    adamw = torch.optim.AdamW(
        [{"params": [theirs.embedding.weight]}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.02, weight_decay=0.1, fused=True,
    )  # fmt: skip
    optimizer = training_optimizer(GroupTask(), ours, options)
    train(ours, [optimizer], range(5))
    train(theirs, [muon, adamw], range(5))
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other), name


@needs_muon
def test_muon_goes_on_from_its_checkpoint_bit_by_bit() -> None:
    options = Training(optimizer="muon", lr=(0.02,))
    torch.manual_seed(0)
    straight = Model()
    optimizer = training_optimizer(GroupTask(), straight, options)
    train(straight, [optimizer], range(3))
    resumed = copy.deepcopy(straight)
    other = training_optimizer(GroupTask(), resumed, options)
    restore(other, copy.deepcopy(optimizer.state_dict()))
    for group in other.param_groups:
        group["lr"] = 0.01  # a schedule's, which must reach the parts
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    train(straight, [optimizer], range(3, 6))
    train(resumed, [other], range(3, 6))
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
    before = copy.deepcopy(resumed)
    for group in other.param_groups:
        group["lr"] = 0.0
    train(resumed, [other], range(6, 7))
    assert all(map(torch.equal, before.parameters(), resumed.parameters()))


@needs_muon
def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(RequestError, match="muon needs matrices, and no trained parameter is one"):
        training_optimizer(GroupTask(), nn.LayerNorm(3), Training(optimizer="muon"))


# ------------------------------------------------------------------------------------------- average of the weights


def test_the_average_is_the_weights_until_it_starts() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, decay=0.75, start=2)
    averaged = []
    for step in range(1, 5):
        nn.init.constant_(model.weight, step)
        average.update(step)
        with average.in_place():
            averaged.append(model.weight.item())
    assert averaged == [1.0, 2.0, 2.25, 0.75 * 2.25 + 0.25 * 4]
