"""Optimizers and learning-rate schedules by name, and the loss scaler.

A schedule is a pure function of the number of updates done, so that a resumed run needs nothing but that number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, optimizer as torch_optimizer

from trainer.contract.errors import RequestError, listed
from trainer.contract.option_rules import FALLING, OF_ONE, flag_of, schedule_conflict, schedule_end
from trainer.contract.options import Training
from trainer.data.batches import EpochBatches
from trainer.data.stream_batches import StreamBatches
from trainer.engine.ddp_model import trainable, values_of, with_sparse_gradient
from trainer.engine.end_conditions import last_update
from trainer.engine.muon import MuonWithAdamW
from trainer.engine.parameter_groups import parameter_groups
from trainer.tasks.task import Task

_WITH_RANGE = Optimizer.profile_hook_step(lambda: None).__code__
"""Code of the function that torch puts around the ``step`` of each class of optimizers."""
RUNNING = ("k", "weight_sum", "lr_max", "scheduled_lr")
"""What the optimizers of the package schedulefree count in their groups, beside settings."""


def training_optimizer(task: Task, model: nn.Module, options: Training) -> Optimizer:
    """Return the task's own optimizer, or else that of the options."""
    own = task.optimizer(model)
    if own is not None:
        _require_plain_step(own)
        _require_no_settings(own, options)
        return own
    sparse = bool(with_sparse_gradient(model))
    if sparse and (options.optimizer not in ("sgd", "adagrad") or options.weight_decay):
        refused = "--weight-decay" if options.optimizer in ("sgd", "adagrad") else f"--optimizer {options.optimizer}"
        raise RequestError(
            f"{refused} takes no sparse gradients, and an embedding of the model has sparse=True: take --optimizer sgd "
            "or adagrad without weight decay, an optimizer of the task's own such as SparseAdam, or sparse=False"
        )
    groups = parameter_groups(task, model, options)
    usual = {"lr": options.lr[0], "weight_decay": options.weight_decay}
    plain = len(groups) == 1 and {name: value for name, value in groups[0].items() if name != "params"} == usual
    return build_optimizer(options, trainable(model) if plain else groups, sparse=sparse)


def take_step(optimizer: Optimizer) -> None:
    """Make a step of an optimizer.

    ``Optimizer.step`` opens a range for torch's profiler and calls hooks around the step of the class, which takes a
    tenth of the time of a training with small layers. Where no profiler runs and there are no hooks, it is left out.
    """
    step = type(optimizer).step
    if (
        getattr(step, "__code__", None) is not _WITH_RANGE
        or "step" in vars(optimizer)
        or torch._C._autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    ):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def without_optimizer(optimizer: Optimizer, model: nn.Module) -> str:
    """Describe the trained parameters that no group of the optimizer holds; empty if there are none.

    Raises:
        RequestError: it holds none.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]
    if not names:
        return ""
    if len(names) == len(trainable(model)):
        raise RequestError("the task's optimizer holds no parameter of the model, so that nothing would be trained")
    keeps = "it keeps its first values" if len(names) == 1 else "they keep their first values"
    return f"no group of the optimizer holds {listed(names)}: {keeps}"


def _require_plain_step(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"the task's optimizer is {type(optimizer).__name__}, whose step computes the loss several times (a "
            "closure); this loop does so once: take another, such as Adam or SGD"
        )


def _require_no_settings(own: Optimizer, options: Training) -> None:
    """Refuse settings that a task's own optimizer does not take."""
    kind, defaults = type(own).__name__, Training()
    of_named = [name for name, (other, _) in OF_ONE.items() if other == "optimizer"]
    for name in ("optimizer", "weight_decay", "decay_norms", *of_named):
        if getattr(options, name) != getattr(defaults, name):
            raise RequestError(f"{flag_of(name)} does nothing beside the task's own optimizer, {kind}: leave it out")
    rates = [float(group["lr"]) for group in own.param_groups]
    if options.lr[0] not in (defaults.lr[0], *rates):
        raise RequestError(
            f"--lr {options.lr[0]:g} does nothing beside the task's own optimizer, {kind}, whose rate is {rates[0]:g}: "
            "leave it out, or set it there"
        )


def build_optimizer(
    options: Training, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], *, sparse: bool = False
) -> Optimizer:
    """Return the optimizer that the options name.

    Weight decay is what the class of that name does: added to the gradient (L2) in sgd, adam, adadelta and adagrad,
    apart from it in the others. Groups of parameters may have another one, see ``parameter_groups``.
    """
    trained: list[Any] = list(params)
    if not trained:
        raise RequestError("the model has no parameters to train: all are frozen, or it has none")
    lr, decay = options.lr[0], options.weight_decay
    beta1, beta2 = options.adam_betas
    fused = _fused(trained, options.optimizer) and not sparse
    match options.optimizer:
        case "sgd":
            return SGD(
                trained, lr, momentum=options.momentum, nesterov=options.nesterov, weight_decay=decay, fused=fused
            )
        case "adam":
            return Adam(trained, lr, betas=(beta1, beta2), eps=options.adam_eps, weight_decay=decay, fused=fused)
        case "adamw":
            return AdamW(trained, lr, betas=(beta1, beta2), eps=options.adam_eps, weight_decay=decay, fused=fused)
        case "muon":
            return MuonWithAdamW(
                trained, momentum=options.muon_momentum, betas=(beta1, beta2), eps=options.adam_eps, fused=fused
            )
        case "schedulefree_adamw":
            from schedulefree import AdamWScheduleFree

            made: Optimizer = AdamWScheduleFree(
                trained, lr, betas=(beta1, beta2), eps=options.adam_eps, weight_decay=decay
            )
            return made
        case "adadelta":
            return Adadelta(trained, lr, rho=options.adadelta_rho, eps=options.adadelta_eps, weight_decay=decay)
        case "adagrad":
            return Adagrad(trained, lr, eps=options.adam_eps, weight_decay=decay, fused=fused)


def _fused(params: list[Any], name: str) -> bool:
    # Adagrad's kernel for GPUs is not in all supported versions of torch; adadelta has none.
    devices = ("cpu",) if name == "adagrad" else ("cpu", "cuda")
    tensors = [tensor for group in params for tensor in (group["params"] if isinstance(group, dict) else [group])]
    if name not in ("adam", "adamw") and any(values_of(tensor) is not tensor for tensor in tensors):
        return False  # torch has the kernels of the others for whole parameters only
    return all(tensor.device.type in devices and tensor.is_floating_point() for tensor in tensors)


def require_state_of(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise if a saved state is not of an optimizer of this kind over the same groups of parameters."""
    own, groups = optimizer.state_dict(), saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise RequestError("its param_groups are not a list of dicts")
    if len(groups) != len(own["param_groups"]):
        raise RequestError(f"it has {len(groups)} parameter groups, but this run {len(own['param_groups'])}")
    for index, (settings, group) in enumerate(zip(own["param_groups"], groups, strict=True)):
        if group.get("params") != settings["params"]:
            raise RequestError(f"the parameters of its param_groups[{index}] are not those of this run")
        # Numbers distinguish the kinds; switches such as fused depend on torch's version.
        lacking = [
            key
            for key, value in settings.items()
            if isinstance(value, int | float | tuple) and not isinstance(value, bool) and key not in group
        ]
        if lacking:
            kind = type(optimizer).__name__
            raise RequestError(f"its optimizer is not {kind}: it has no {', '.join(lacking)}")
        if running := [key for key in RUNNING if key in group and key not in settings]:
            raise RequestError(f"its optimizer is not {type(optimizer).__name__}: it has {', '.join(running)}")
    known = {parameter for group in own["param_groups"] for parameter in group["params"]}
    state = saved.get("state")
    if not isinstance(state, Mapping) or not all(isinstance(of_one, Mapping) for of_one in state.values()):
        raise RequestError("its state is not a dict of dicts")
    if unknown := [parameter for parameter in state if parameter not in known]:
        raise RequestError(f"its state[{unknown[0]!r}] belongs to no parameter of this run")


def restore(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's saved state, but keep the settings of this run.

    torch's own ``load_state_dict`` brings the saved settings along, so that a new ``--weight-decay`` would do nothing.

    Raises:
        RequestError: the state was saved by another kind of optimizer.
    """
    require_state_of(optimizer, saved)
    groups = optimizer.state_dict()["param_groups"]
    for group, before in zip(groups, saved["param_groups"], strict=True):
        group.update({key: before[key] for key in RUNNING if key in group})
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


class Schedule:
    """The learning rate over the updates: a linear warm-up, then the shape that the options name."""

    def __init__(self, options: Training, optimizer: Optimizer, *, end: int = 0) -> None:
        """Set the learning rate of the first update; ``end``: the one at which a falling schedule ends.

        The schedule is of ``options.lr``, which may have one value per epoch. A parameter group with another learning
        rate keeps its ratio to that throughout, so that the rates of a task's own optimizer are its peaks. The options
        are consistent: ``option_rules`` has the settings that a schedule needs.
        """
        self._options = options
        self._optimizer = optimizer
        self._planned = self._end = end or schedule_end(options)
        self._factors = [float(group["lr"]) / options.lr[0] for group in optimizer.param_groups]
        self._main = self._factors.index(1.0) if 1.0 in self._factors else 0
        self._updates = 0
        self._epoch = 1
        self.step(0)

    def lr_at(self, update: int) -> float:
        """Return the learning rate after ``update`` updates, for the next one.

        With n updates, W of warm-up, T in all and p = (n - W) / (T - W): n < W rises linearly from
        ``warmup_init_lr``; then ``inverse_sqrt`` is lr · √(W / n) (Vaswani et al. 2017, section 5.3), ``cosine`` falls
        as (1 + cos πp) / 2 (Loshchilov & Hutter 2017, equation 5) and ``polynomial_decay`` as (1 - p)^power. ``wsd``
        stays, and falls so in the last ``decay_updates`` (Hu et al. 2024, section 4).
        """
        options, warmup = self._options, self._options.warmup_updates
        lr = options.lr[min(self._epoch, len(options.lr)) - 1]
        if update < warmup:
            return options.warmup_init_lr + (lr - options.warmup_init_lr) * update / warmup
        low = options.end_learning_rate
        match options.lr_scheduler:
            case "fixed":
                return lr
            case "inverse_sqrt":
                # Without a warm-up the decay starts at the first update, where √(W / n) has W = 1.
                return lr * math.sqrt(max(warmup, 1) / max(update, 1))
            case "step":
                return float(lr * options.lr_step_gamma ** ((update - warmup) // options.lr_step_updates))
            case "polynomial_decay":
                return float(low + (lr - low) * (1 - self._progress(update)) ** options.power)
            case "wsd":
                done = max(0.0, 1 - (self._end - update) / options.decay_updates)
                return float(low + (lr - low) * (1 - min(1.0, done)) ** options.power)
            case "cosine":
                return low + (lr - low) * (1 + math.cos(math.pi * self._progress(update))) / 2

    def _progress(self, update: int) -> float:
        warmup = self._options.warmup_updates
        return min(1.0, (update - warmup) / (self._end - warmup))

    @property
    def lr(self) -> float:
        """That of the options, if a group has it; else that of the first group."""
        return float(self._optimizer.param_groups[self._main]["lr"])

    def step(self, num_updates: int) -> None:
        """Set the learning rate for the update that follows ``num_updates`` others.

        A warm-up from 0 would waste the first update, so that one gets the learning rate of the second, as in HetSeq.
        """
        self._updates = num_updates
        lr = self.lr_at(num_updates)
        if num_updates == 0 and lr == 0.0:
            lr = self.lr_at(1)
        for group, factor in zip(self._optimizer.param_groups, self._factors, strict=True):
            group["lr"] = lr * factor

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self.step(self._updates)

    def state_dict(self) -> dict[str, int]:
        """Everything else is in the options and the position in the data."""
        return {"updates": self._updates, "planned": self._planned, "end": self._end}

    def load_state_dict(
        self, state: Mapping[str, int], train: EpochBatches | StreamBatches, *, same_data: bool = True
    ) -> None:
        """Go on at a checkpoint; ``train`` has its position, or with other data begins.

        A schedule over epochs ends with the last of them. Where they have other numbers of steps than before, as with
        other ranks, that is not the step at which a training from the start ends.
        """
        if same_data and state["planned"] == self._planned:
            self._end = state["end"]
        elif falls_over_epochs(self._options):
            self._end = epochs_end(self._options, last_update(self._options, train, updates=state["updates"]))
        self.step(state["updates"])
        self.begin_epoch(train.position.epoch)


def falls_over_epochs(options: Training) -> bool:
    """Return whether the schedule falls until the last of ``max_epochs``."""
    return options.lr_scheduler in FALLING and not schedule_end(options)


def falling_end(options: Training, train: EpochBatches | StreamBatches) -> int:
    """Return the step at which a falling schedule ends, by the options or by the data; 0 for the others."""
    if falls_over_epochs(options):
        return epochs_end(options, last_update(options, train, updates=0))
    return schedule_end(options)


def epochs_end(options: Training, updates: int) -> int:
    """Return the step at which a schedule over ``max_epochs`` ends, which have that many updates; 0: unknown.

    Raises:
        RequestError: it is unknown, or leaves the schedule no step to fall in.
    """
    if not updates:
        raise RequestError(
            f"--lr-scheduler {options.lr_scheduler} over --max-epochs needs the number of samples, which this stream "
            "does not tell: give --total-num-update or --max-updates"
        )
    epochs = f"{options.max_epochs} epoch" + "s" * (options.max_epochs != 1)
    if conflict := schedule_conflict(options, updates, ends_at=f"step {updates}, with {epochs}"):
        raise RequestError(f"{flag_of(conflict[0])} {conflict[1]}")
    return updates


class LossScaler:
    """Wrapper of torch's ``GradScaler`` whose ``step`` returns whether it was taken; passes through if not enabled."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.value = self._scaler.get_scale()
        self.left_out = 0

    def scale(self, loss: Tensor) -> Tensor:
        if not self.enabled:
            return loss
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        if self.enabled:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step unless a gradient is not finite, and adjust the scale; return whether the step was taken.

        In fp16 this is a CPU-GPU sync point, as ``GradScaler.step`` is for every optimizer that is not fused.
        """
        if not self.enabled:
            take_step(optimizer)
            return True
        self._scaler.step(optimizer)
        self._scaler.update()
        before, self.value = self.value, self._scaler.get_scale()
        taken = self.value >= before  # only a gradient that is not finite lowers it
        self.left_out = 0 if taken else self.left_out + 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Empty in another precision than fp16."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the initial scale if the state, of another precision, is empty."""
        if state and self.enabled:
            self._scaler.load_state_dict(dict(state))
            self.value = self._scaler.get_scale()
