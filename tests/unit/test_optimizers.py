from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.batches import EpochBatches
from trainer.engine.optimizers import Schedule, build_optimizer, epochs_end, falling_end, restore, take_step


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([2.0, -1.0]))]


def schedule(**options: Any) -> Schedule:
    training = Training(**options)
    return Schedule(training, build_optimizer(training, parameters()))


def data(*, ranks: int = 1, epoch: int = 1, consumed: int = 0) -> EpochBatches:
    train = EpochBatches(range(60), collate=list, batch_sizes=(10,) * ranks, rank=0, seed=1, shuffle=True)
    train.load_state_dict({**train.state_dict(), "epoch": epoch, "consumed": consumed})
    return train


HETSEQ_MNIST = {"lr": (1.01,), "lr_scheduler": "polynomial_decay", "total_num_update": 50_000}
HETSEQ_BERT = {
    "lr": (1e-4,),
    "lr_scheduler": "polynomial_decay",
    "warmup_updates": 10_000,
    "total_num_update": 1_000_000,
}
FAIRSEQ_LM = {"lr": (5e-4,), "lr_scheduler": "inverse_sqrt", "warmup_updates": 4000, "warmup_init_lr": 1e-7}
WSD = {
    "lr": (0.1,), "lr_scheduler": "wsd", "warmup_updates": 10, "max_updates": 100, "decay_updates": 20,
    "end_learning_rate": 0.01,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "update", "expected"),
    [
        (HETSEQ_MNIST, 0, 1.01),
        (HETSEQ_MNIST, 1, 1.0099798),
        (HETSEQ_MNIST, 938, 0.99105240),
        (HETSEQ_MNIST, 25_000, 0.505),
        (HETSEQ_MNIST, 50_000, 0.0),
        (HETSEQ_MNIST, 60_000, 0.0),
        (HETSEQ_BERT, 0, 0.0),
        (HETSEQ_BERT, 1, 1e-8),
        (HETSEQ_BERT, 5_000, 5e-5),
        (HETSEQ_BERT, 10_000, 1e-4),
        (HETSEQ_BERT, 505_000, 5e-5),
        (HETSEQ_BERT, 1_000_000, 0.0),
        (FAIRSEQ_LM, 0, 1e-7),
        (FAIRSEQ_LM, 2_000, 2.5005e-4),
        (FAIRSEQ_LM, 4_000, 5e-4),
        (FAIRSEQ_LM, 16_000, 2.5e-4),
        (WSD, 5, 0.05),
        (WSD, 10, 0.1),
        (WSD, 80, 0.1),
        (WSD, 90, 0.055),
        (WSD, 100, 0.01),
        (WSD, 120, 0.01),
        ({**WSD, "power": 2.0}, 90, 0.0325),
    ],
)
def test_learning_rates_are_those_of_the_formulas(options: dict[str, Any], update: int, expected: float) -> None:
    assert schedule(**options).lr_at(update) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr_scheduler": "fixed"}, {0: 1.0, 7: 1.0}),
        ({"lr_scheduler": "fixed", "warmup_updates": 4}, {0: 0.0, 1: 0.25, 4: 1.0, 9: 1.0}),
        ({"lr_scheduler": "fixed", "warmup_updates": 4, "warmup_init_lr": 0.5}, {0: 0.5, 2: 0.75, 4: 1.0}),
        ({"lr_scheduler": "inverse_sqrt"}, {0: 1.0, 1: 1.0, 4: 0.5, 100: 0.1}),
        ({"lr_scheduler": "cosine", "max_updates": 100}, {0: 1.0, 25: 0.5 + math.sqrt(0.125), 50: 0.5, 100: 0.0}),
        (
            {"lr_scheduler": "cosine", "total_num_update": 110, "warmup_updates": 10, "end_learning_rate": 0.2},
            {5: 0.5, 10: 1.0, 60: 0.6, 110: 0.2, 500: 0.2},
        ),
        ({"lr_scheduler": "polynomial_decay", "max_updates": 10, "power": 2.0}, {0: 1.0, 5: 0.25, 10: 0.0}),
        ({"lr_scheduler": "polynomial_decay", "max_updates": 10, "end_learning_rate": 0.5}, {5: 0.75, 11: 0.5}),
        (
            {"lr_scheduler": "step", "lr_step_updates": 3, "warmup_updates": 2, "lr_step_gamma": 0.5},
            {1: 0.5, 2: 1.0, 4: 1.0, 5: 0.5, 7: 0.5, 8: 0.25},
        ),
    ],
)
def test_every_shape_starts_after_a_linear_warm_up(options: dict[str, Any], expected: dict[int, float]) -> None:
    built = schedule(lr=(1.0,), **options)
    assert {update: built.lr_at(update) for update in expected} == pytest.approx(expected)


def test_total_num_update_wins_over_max_updates() -> None:
    built = schedule(lr=(1.0,), lr_scheduler="polynomial_decay", total_num_update=10, max_updates=1000)
    assert built.lr_at(5) == pytest.approx(0.5)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(RequestError, match="no parameters to train"):
        build_optimizer(Training(), [])


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, 0.1)),
        (
            {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        (
            {"optimizer": "adam", "adam_betas": (0.9, 0.98), "adam_eps": 1e-6, "weight_decay": 0.3},
            lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.3),
        ),
        (
            {"optimizer": "adamw", "weight_decay": 0.3},
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3),
        ),
        (
            {"optimizer": "adadelta", "adadelta_rho": 0.8, "adadelta_eps": 1e-5},
            lambda p: torch.optim.Adadelta(p, 0.1, rho=0.8, eps=1e-5),
        ),
        ({"optimizer": "adagrad", "adam_eps": 1e-3}, lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-3)),
    ],
)
def test_optimizers_by_name_are_those_of_torch(options: dict[str, Any], reference: Any) -> None:
    ours, theirs = parameters(), parameters()
    optimizers = build_optimizer(Training(lr=(0.1,), **options), ours), reference(theirs)
    for _ in range(3):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            params[0].square().sum().backward()
            optimizer.step()
    assert torch.equal(ours[0], theirs[0])


def moved(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.Tensor:
    for step in range(steps):
        parameter.grad = torch.full_like(parameter, 0.3 * (step + 1))
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_a_fused_optimizer_does_what_the_plain_one_does_and_goes_on_from_its_checkpoint(name: Any) -> None:
    options = Training(optimizer=name, lr=(0.1,), weight_decay=0.01, momentum=0.9 if name == "sgd" else 0.0)
    (ours,), (theirs,) = parameters(), parameters()
    fused, plain = build_optimizer(options, [ours]), build_optimizer(options, [theirs], sparse=True)
    assert (fused.param_groups[0]["fused"], plain.param_groups[0]["fused"]) == (True, False)
    assert torch.allclose(moved(ours, fused), moved(theirs, plain))
    restore(fused, copy.deepcopy(plain.state_dict()))
    with torch.no_grad():
        ours.copy_(theirs)
    assert torch.allclose(moved(ours, fused), moved(theirs, plain))


def test_parameters_that_no_fused_kernel_takes_are_updated_by_the_plain_one() -> None:
    complex_ones = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
    assert not build_optimizer(Training(optimizer="adam"), complex_ones).param_groups[0]["fused"]


def with_gradient(kind: type[Optimizer], **settings: Any) -> tuple[Any, nn.Parameter]:
    (parameter,) = parameters()
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.5, **settings), parameter  # type: ignore[call-arg]


class NoGrad(SGD):
    """As users write optimizers: with a decorator of their own around the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad


def counted(step: Any) -> Any:
    """Decorate a step as one that copies all attributes of what it decorates, also that it has torch's range."""

    @functools.wraps(step)
    def call(self: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return step(self)

    return call


class Counted(SGD):
    step = counted(SGD.step)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(SGD, [1.5, -1.5]), (torch.optim.Adam, [1.5, -1.5]), (NoGrad, [1.0, -2.0]), (Counted, [1.5, -1.5])],
)
def test_a_step_taken_is_that_of_the_optimizer(kind: Any, expected: list[float]) -> None:
    optimizer, parameter = with_gradient(kind)
    take_step(optimizer)
    assert parameter.tolist() == pytest.approx(expected)
    assert getattr(optimizer, "count", 0) == (kind is Counted)


@pytest.mark.parametrize("way", ["pre", "post", "of all", "attribute"])
def test_a_step_taken_calls_the_hooks_of_the_optimizer(way: str) -> None:
    optimizer, parameter = with_gradient(SGD)
    calls: list[list[float]] = []

    def note(*_: Any) -> None:
        calls.append(parameter.tolist())

    removes = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "of all": register_optimizer_step_post_hook,
        "attribute": lambda hook: vars(optimizer).update(step=hook),
    }[way](note)
    take_step(optimizer)
    if removes is not None:
        removes.remove()
    assert calls == [[1.5, -1.5] if way in ("post", "of all") else [2.0, -1.0]]


def test_a_step_taken_is_seen_by_a_profiler() -> None:
    optimizer, parameter = with_gradient(SGD)
    with torch.profiler.profile() as profile:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}
    assert parameter.tolist() == [1.5, -1.5]


def test_weight_decay_of_adam_is_l2_and_that_of_adamw_is_decoupled() -> None:
    moved = {}
    for name in ("adam", "adamw"):
        [parameter] = parameters()
        optimizer = build_optimizer(Training(lr=(0.1,), optimizer=name, weight_decay=0.5), [parameter])
        parameter.grad = torch.zeros(2)
        optimizer.step()
        moved[name] = parameter.tolist()
    # L2: the decay is the whole gradient, which Adam normalises to a step of lr. Decoupled: lr · decay · parameter.
    assert moved["adam"] == pytest.approx([1.9, -0.9])
    assert moved["adamw"] == pytest.approx([1.9, -0.95])


def test_a_group_keeps_the_ratio_of_its_learning_rate() -> None:
    [first], [second] = parameters(), parameters()
    training = Training(lr=(1.0,), lr_scheduler="polynomial_decay", max_updates=10)
    optimizer = build_optimizer(training, [{"params": [first]}, {"params": [second], "lr": 0.1}])
    built = Schedule(training, optimizer)
    for update in range(11):
        built.step(update)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1 - update / 10, 0.1 - update / 100])
    assert built.lr == 0.0


@pytest.mark.parametrize(("scales", "shown"), [((0.1, 1.0), 0.5), ((1.0, 0.1), 0.5), ((0.1, 0.2), 0.05)])
def test_the_learning_rate_that_is_shown_is_that_of_the_options_where_a_group_has_it(
    scales: tuple[float, ...], shown: float
) -> None:
    training = Training(lr=(0.5,))
    groups = [{"params": parameters(), "lr": 0.5 * scale} for scale in scales]
    assert Schedule(training, build_optimizer(training, groups)).lr == pytest.approx(shown)


def test_a_list_of_learning_rates_has_one_per_epoch_and_the_last_for_all_that_follow() -> None:
    built = schedule(lr=(0.1, 0.05, 0.01), warmup_updates=4)
    rates = []
    for epoch, update in [(1, 1), (1, 4), (2, 5), (3, 6), (9, 7)]:
        built.begin_epoch(epoch)
        built.step(update)
        rates.append(built.lr)
    assert rates == pytest.approx([0.025, 0.1, 0.05, 0.01, 0.01])


def test_a_warm_up_from_zero_does_not_waste_the_first_update() -> None:
    built = schedule(lr=(1.0,), warmup_updates=10)
    rates = [built.lr]
    for update in range(1, 4):
        built.step(update)
        rates.append(built.lr)
    assert rates == pytest.approx([0.1, 0.1, 0.2, 0.3])


def test_a_resumed_schedule_continues_at_the_saved_update() -> None:
    options = {"lr": (0.7,), "lr_scheduler": "cosine", "warmup_updates": 3, "max_updates": 20}
    straight, resumed = schedule(**options), schedule(**options)
    straight.step(13)
    resumed.load_state_dict(straight.state_dict(), data())
    assert resumed.lr == straight.lr == straight.lr_at(13)


@pytest.mark.parametrize(
    ("before", "now", "done", "changes", "end"),
    [
        (2, 2, 6, {}, 12),
        (1, 2, 12, {}, 18),  # a training of 2 ranks from the start ends at 12
        (2, 1, 6, {}, 18),
        (2, 1, 6, {"update_freq": (2, 4)}, 10),
        (2, 2, 6, {"max_epochs": 6}, 18),
        (1, 2, 12, {"total_num_update": 15}, 15),
    ],
)
def test_a_resumed_schedule_over_epochs_ends_with_the_last_of_them(
    before: int, now: int, done: int, changes: dict[str, Any], end: int
) -> None:
    options: dict[str, Any] = {"lr_scheduler": "cosine", "max_epochs": 4}

    def begun(training: Training, train: EpochBatches) -> Schedule:
        return Schedule(training, build_optimizer(training, parameters()), end=falling_end(training, train))

    first = begun(Training(**options), data(ranks=before))
    first.step(done)
    resumed = begun(Training(**options | changes), data(ranks=now))
    resumed.load_state_dict(first.state_dict(), data(ranks=now, epoch=3))
    assert [resumed.lr_at(end) > 0, resumed.lr_at(end - 1) > 0] == [False, True]
    again = begun(Training(**options | changes), data(ranks=now))
    again.load_state_dict(resumed.state_dict(), data(ranks=now, epoch=3, consumed=20))
    assert again.lr_at(13) == resumed.lr_at(13), "it goes on as an uninterrupted one"
    new = begun(Training(**options), data(ranks=before))
    new.load_state_dict(first.state_dict(), data(ranks=before), same_data=False)
    assert new.lr_at(done + 4 * 6 // before - 1) > 0, "all epochs of other data are before its end"


def test_loading_an_optimizer_before_its_schedule_keeps_the_ratios() -> None:
    training = Training(lr=(1.0,), lr_scheduler="polynomial_decay", max_updates=10)

    def build() -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = build_optimizer(training, [{"params": parameters()}, {"params": parameters(), "lr": 0.1}])
        return optimizer, Schedule(training, optimizer)

    optimizer, built = build()
    built.step(5)
    saved = optimizer.state_dict(), built.state_dict()
    optimizer, built = build()
    optimizer.load_state_dict(saved[0])
    built.load_state_dict(saved[1], data())
    built.step(6)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])


def test_a_resumed_optimizer_has_the_saved_state_and_the_settings_of_its_own_run() -> None:
    [parameter] = parameters()
    saved = build_optimizer(Training(optimizer="adamw", weight_decay=0.5), [parameter])
    parameter.grad = torch.ones(2)
    saved.step()
    resumed = build_optimizer(Training(optimizer="adamw", weight_decay=0.25), [parameter])
    restore(resumed, saved.state_dict())
    assert resumed.param_groups[0]["weight_decay"] == 0.25
    assert torch.equal(resumed.state[parameter]["exp_avg"], saved.state[parameter]["exp_avg"])


@pytest.mark.parametrize(("saved", "other"), [*itertools.permutations(["sgd", "adam", "adadelta", "adagrad"], 2)])
def test_the_state_of_another_optimizer_is_refused(saved: Any, other: Any) -> None:
    state = build_optimizer(Training(optimizer=saved), parameters()).state_dict()
    with pytest.raises(RequestError, match="its optimizer is not"):
        restore(build_optimizer(Training(optimizer=other), parameters()), state)


@pytest.mark.parametrize(
    ("options", "updates", "text"),
    [
        ({"lr_scheduler": "cosine"}, 0, "--lr-scheduler cosine over --max-epochs needs the number of samples"),
        (
            {"lr_scheduler": "cosine", "warmup_updates": 8}, 8,
            "--warmup-updates is 8, but --lr-scheduler cosine ends at step 8, with 2 epochs; the warm-up",
        ),
        (
            {"lr_scheduler": "wsd", "warmup_updates": 8, "decay_updates": 3}, 10,
            "--decay-updates is 3, but --lr-scheduler wsd ends at step 10, with 2 epochs, and its warm-up takes 8",
        ),
    ],
)  # fmt: skip
def test_a_schedule_over_epochs_needs_steps_to_fall_in(options: dict[str, Any], updates: int, text: str) -> None:
    with pytest.raises(RequestError) as refused:
        epochs_end(Training(max_epochs=2, **options), updates)
    assert str(refused.value).startswith(text)
    assert epochs_end(Training(max_epochs=2, **options), 11) == 11
