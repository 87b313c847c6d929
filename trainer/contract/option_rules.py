"""Rules between options: what no single value shows, refused alike by recipe, form, command line and rank.

Torch-free. A rule names the option that it is about and the others in the reader's spelling: ``--lr-scheduler`` on a
command line, ``train.lr_scheduler`` in a recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from trainer.contract.errors import RequestError
from trainer.contract.options import Script, Training
from trainer.contract.schema import text_of
from trainer.contract.task_options import BuiltInOptions

Named = Callable[[str], str]
"""Returns how an option of ``Training`` is written where the request comes from."""

FALLING = ("polynomial_decay", "cosine", "wsd")
"""Schedules that fall to ``end_learning_rate`` at a certain step."""
RESETS = ("reset_optimizer", "reset_dataloader", "reset_meters")
"""Options that leave out a part of the checkpoint on resuming."""

ADAMS = ("adam", "adamw", "muon", "schedulefree_adamw")
OF_ONE = {
    "momentum": ("optimizer", ("sgd",)),
    "nesterov": ("optimizer", ("sgd",)),
    "adam_betas": ("optimizer", ADAMS),
    "adam_eps": ("optimizer", (*ADAMS, "adagrad")),
    "muon_momentum": ("optimizer", ("muon",)),
    "adadelta_rho": ("optimizer", ("adadelta",)),
    "adadelta_eps": ("optimizer", ("adadelta",)),
    "decay_updates": ("lr_scheduler", ("wsd",)),
    "lr_step_updates": ("lr_scheduler", ("step",)),
    "lr_step_gamma": ("lr_scheduler", ("step",)),
    "power": ("lr_scheduler", ("polynomial_decay", "wsd")),
    "end_learning_rate": ("lr_scheduler", FALLING),
    "total_num_update": ("lr_scheduler", FALLING),
    "min_loss_scale": ("precision", ("fp16",)),
}
"""Options that do nothing but with some values of another one, with that one and these."""

DDP_ONLY = (
    "ddp_comm_hook",
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "bucket_cap_mb",
    "gradient_as_bucket_view",
)
"""Options of DDP, which does not take part in a sharded training."""


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def with_keys(message: str) -> str:
    """Return a message of a rank with the keys of a recipe in place of flags: ``train.lr`` for ``--lr``."""
    keys = (*Training.__struct_fields__, "share_devices")  # of the launch: the only one that ranks name

    def key(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return f"train.{name}" if name in keys else flag[0]

    return _FLAG.sub(key, message)


def require_consistent(
    options: Training, task_options: Any = None, *, where: Named = flag_of, named: Named = flag_of
) -> None:
    """Require options that do not contradict each other.

    Args:
        options: the options of the training.
        task_options: options of its task; only those of a built-in one say what the task has.
        where: returns the place of an option, at which the message begins.
        named: returns the name of another option within the message.

    Raises:
        RequestError: one line about the first rule that is broken.
    """
    task = task_options if isinstance(task_options, BuiltInOptions) else None
    for key, conflict in _conflicts(options, task, named):
        raise RequestError(f"{where(key)} {conflict}")


def require_one_launcher(script: Script, *, where: Named = flag_of) -> None:
    """Check that a script that starts the ranks does not expect to be one.

    Raises:
        RequestError: it does.
    """
    if script.starts_ranks and script.local_rank_flag is not None:
        raise RequestError(
            f"{where('local_rank_flag')} gives a rank's number to a script, but with {where('starts_ranks')} the "
            "script is no rank and starts them: remove one of both"
        )


def require_end(options: Training, task_options: Any = None, *, where: Named = flag_of, named: Named = flag_of) -> None:
    """Require a training that makes a step and comes to an end; an evaluation ends by itself.

    The arguments are those of ``require_consistent``.

    Raises:
        RequestError: one line about the limit that is missing or never reached.
    """
    task = task_options if isinstance(task_options, BuiltInOptions) else None
    for key, conflict in () if options.eval_only else _of_end(options, task, named):
        raise RequestError(f"{where(key)} {conflict}")


def require_batch_sizes(options: Training, world_size: int, *, where: Named = flag_of) -> None:
    """Require one batch size for all ranks, or one per rank; of those that are balanced at least one sample each."""
    sizes = options.batch_size
    ranks = "is 1 rank" if world_size == 1 else f"are {world_size} ranks"
    if sizes == "balanced":
        if options.global_batch_size < world_size:
            raise RequestError(
                f"{where('global_batch_size')} is {options.global_batch_size}, but there {ranks}, each with at least "
                f"1 sample: give {world_size} or more"
            )
        return
    count = len(sizes or ())
    if count not in (0, 1, world_size):
        raise RequestError(f"{where('batch_size')} has {count} values, but there {ranks}; give one, or one per rank")


def require_ranks(options: Training, world_size: int, *, where: Named = flag_of) -> None:
    """Require batch sizes that fit the ranks, and several ranks for a model that is divided among them."""
    require_batch_sizes(options, world_size, where=where)
    if options.strategy == "fsdp" and world_size == 1 and not options.eval_only:
        raise RequestError(
            f"{where('strategy')} is fsdp, which divides a model among several ranks, and there is 1 rank: take more, "
            "or ddp"
        )


def ends_without_validation(options: Training) -> bool:
    """Return whether a limit ends the training even if no validation is ever made."""
    limited = options.max_epochs or options.max_updates or options.stop_time
    return bool(limited) or (options.min_lr >= 0 and _last_lr(options) <= options.min_lr)


def start_option(options: Training) -> str:
    """Return the option with the file or folder that a run reads before its first step; empty if it reads none.

    A run that resumes has its own weights, and does not read those of ``finetune_from``.
    """
    return next((name for name in ("eval_only", "resume", "finetune_from") if getattr(options, name)), "")


def evaluated_split(options: Training, splits: Collection[str]) -> str:
    """Return the split that ``eval_only`` evaluates, of those that the task has."""
    return options.eval_split or ("valid" if "valid" in splits and "test" not in splits else "test")


def _conflicts(options: Training, task: BuiltInOptions | None, named: Named) -> Iterator[tuple[str, str]]:
    """Yield the option that a refusal is about, and the refusal after its name."""
    if options.eval_only:
        if options.resume:
            yield ("eval_only", f"does not train, and {named('resume')} does: leave one of them out")
        if task is not None and (split := evaluated_split(options, task.splits)) not in task.splits:
            known = ", ".join(name for name in task.splits if name != "train") or "none besides train"
            yield ("eval_split", f"is {split}, but the task has no such split; it has {known}")
    else:
        for name in RESETS:
            if getattr(options, name) and not options.resume:
                yield (name, f"needs {named('resume')}, the checkpoint that the training continues from")
        if options.finetune_partial and not options.finetune_from:
            yield ("finetune_partial", f"needs {named('finetune_from')}, the file with the weights")
        yield from _of_optimizer(options, named)
    if options.strategy == "fsdp":
        yield from _of_sharding(options, task, named)
    if options.checkpoint_run and not (options.resume or options.eval_only):
        why = f"needs {named('resume')} or {named('eval_only')}, the folder with that run's checkpoints"
        yield "checkpoint_run", why
    yield from _of_batch_size(options, named)
    if options.curriculum and not options.shuffle:
        yield ("curriculum", f"is of shuffled data, and {named('shuffle')} is false: leave one of them out")
    if options.keep_last_epochs and not options.save_every_epochs:
        yield ("keep_last_epochs", f"keeps checkpoints of {named('save_every_epochs')}, and that is 0: give that too")
    if options.required_batch_size_multiple > 1 and not options.max_tokens:
        why = f"cuts the batches of {named('max_tokens')}: give that too, or leave it out"
        yield "required_batch_size_multiple", why
    if task is None:
        return
    if options.max_tokens and not task.has_sizes:
        yield ("max_tokens", f"needs the tokens of each sample, which {options.task} does not give")
    if options.activation_checkpointing and not options.eval_only and not task.has_checkpointed_modules:
        why = f"needs modules whose activations may be computed again, and {options.task} names none"
        yield "activation_checkpointing", why


def _of_sharding(options: Training, task: BuiltInOptions | None, named: Named) -> Iterator[tuple[str, str]]:
    defaults = Training()
    for name in DDP_ONLY:
        if getattr(options, name) != getattr(defaults, name):
            yield (name, f"is of DDP, and {named('strategy')} fsdp has none: leave one of them out")
    if options.compile != "off":
        yield ("compile", f"is not possible with {named('strategy')} fsdp: leave one of them out")
    if options.batch_size == "balanced":
        yield ("batch_size", f"is balanced, which {named('strategy')} fsdp does not know: leave one of them out")
    if options.optimizer == "muon":
        why = f"muon needs whole matrices, which {named('strategy')} fsdp divides among the ranks: take adamw"
        yield "optimizer", why
    if task is not None and not task.has_repeated_block:
        yield ("strategy", f"fsdp divides a model by its repeated block, and that of {options.task} has none: take ddp")


def _of_batch_size(options: Training, named: Named) -> Iterator[tuple[str, str]]:
    sizes = options.batch_size
    if sizes != "balanced":
        if options.shares_from:
            yield ("shares_from", f"repeats the shares of {named('batch_size')} balanced: give that, or leave it out")
        if options.global_batch_size:
            yield (
                "global_batch_size",
                f"is what {named('batch_size')} balanced divides among the ranks, and that is "
                f"{'not given' if sizes is None else text_of(sizes)}: make it balanced, or leave one of them out",
            )
        if options.max_tokens and len(sizes or ()) > 1:
            yield (
                "batch_size",
                f"has {len(sizes or ())} values, but {named('max_tokens')} makes batches that any rank may get: give "
                "one, the most samples of a batch",
            )
        return
    if not options.global_batch_size:
        yield (
            "batch_size",
            f"is balanced, which needs {named('global_batch_size')}, the samples of all ranks together in a micro-step "
            f"(the tokens with {named('max_tokens')})",
        )
    if options.fix_batches_to_gpus:
        yield (
            "batch_size",
            f"is balanced, so the ranks' shares change, but {named('fix_batches_to_gpus')} gives each rank the same "
            "batches in every epoch: leave one out",
        )
    if options.max_tokens and options.drop_last:
        yield (
            "drop_last",
            f"leaves out what does not fill the batch of every rank, but with {named('batch_size')} balanced and "
            f"{named('max_tokens')} every rank gets a part of every batch: leave it out",
        )


def _of_optimizer(options: Training, named: Named) -> Iterator[tuple[str, str]]:
    schedule, defaults = options.lr_scheduler, Training()
    for name, (other, values) in OF_ONE.items():
        if getattr(options, name) != getattr(defaults, name) and (value := getattr(options, other)) not in values:
            *most, last = values
            known = f"{', '.join(most)} or {last}" if most else last
            yield (name, f"is of {named(other)} {known}, and that is {value}: leave one of them out")
    if options.optimizer == "sgd" and options.nesterov and not options.momentum:
        yield ("nesterov", f"needs a {named('momentum')} above 0")
    if schedule == "step" and not options.lr_step_updates:
        why = f"is step, which needs {named('lr_step_updates')}, the optimizer steps between two decays"
        yield "lr_scheduler", why
    if len(options.lr) > 1 and schedule != "fixed":
        yield (
            "lr",
            f"has {len(options.lr)} values, one per epoch, but {named('lr_scheduler')} {schedule} computes all from "
            f"one: give one, or {named('lr_scheduler')} fixed",
        )
    if options.optimizer == "schedulefree_adamw" and options.ema_decay:
        why = f"averages the weights, as {named('optimizer')} {options.optimizer} does itself: leave it out"
        yield "ema_decay", why
    if options.optimizer == "schedulefree_adamw" and not options.adam_betas[0]:
        yield ("adam_betas", f"begins with 0, by which {named('optimizer')} {options.optimizer} divides: give more")
    if not (options.decay_norms or options.weight_decay):
        yield ("decay_norms", f"is false, but {named('weight_decay')} is 0: there is no decay to leave out")
    if options.warmup_init_lr and not options.warmup_updates:
        yield ("warmup_init_lr", f"needs {named('warmup_updates')}, the optimizer steps of the warm-up")
    if options.ema_start and not options.ema_decay:
        yield ("ema_start", f"needs {named('ema_decay')}, the decay of the average that begins there")
    if schedule == "wsd" and not options.decay_updates:
        yield ("lr_scheduler", f"is wsd, which needs {named('decay_updates')}, the optimizer steps of its decay")
    if schedule not in FALLING:
        return
    end = schedule_end(options)
    if not end and not options.max_epochs:
        yield (
            "lr_scheduler",
            f"is {schedule}, which needs {named('total_num_update')}, {named('max_updates')} or {named('max_epochs')}, "
            "the step at which it ends",
        )
    elif end:
        limit = named("total_num_update" if options.total_num_update else "max_updates")
        if conflict := schedule_conflict(options, end, ends_at=f"{limit} {end}", named=named):
            yield conflict


def schedule_conflict(options: Training, end: int, *, ends_at: str, named: Named = flag_of) -> tuple[str, str] | None:
    """Return the option that leaves a falling schedule no step to fall in before its ``end``, and why; None if none."""
    schedule = f"{named('lr_scheduler')} {options.lr_scheduler}"
    if end <= options.warmup_updates:
        why = f"is {options.warmup_updates}, but {schedule} ends at {ends_at}; the warm-up must be shorter"
        return "warmup_updates", why
    if end < options.warmup_updates + options.decay_updates:
        return (
            "decay_updates",
            f"is {options.decay_updates}, but {schedule} ends at {ends_at}, and its warm-up takes "
            f"{options.warmup_updates} of these steps: the decay must fit into the rest",
        )
    return None


def _of_end(options: Training, task: BuiltInOptions | None, named: Named) -> Iterator[tuple[str, str]]:
    first = _first_lr(options)
    if first <= options.min_lr and not options.resume:
        yield (
            "min_lr",
            f"is {options.min_lr:g}, but the learning rate begins at {first:g}, so nothing would be trained: lower it, "
            f"or raise {named('lr')}",
        )
    limits = f"{named('max_epochs')}, {named('max_updates')} or {named('stop_time')}"
    if options.patience:
        has_data = task is None or "valid" in task.splits
        if unused := patience_conflict(options, has_data=has_data, named=named):
            yield ("patience", unused)
    elif ends_without_validation(options):
        return
    elif options.min_lr >= 0:
        yield (
            "min_lr",
            f"is {options.min_lr:g}, but the learning rate stays above it, and nothing would end this training: "
            f"set {limits} too",
        )
    else:
        why = f"is 0, and nothing would end this training: set {limits}, or {named('patience')} or {named('min_lr')}"
        yield "max_updates", why


def patience_conflict(options: Training, *, has_data: bool, named: Named = flag_of) -> str:
    """Return why ``patience`` does nothing, after its name; empty if there are validations to count."""
    if not (options.valid_every_epochs or options.valid_every_updates):
        reason = f"{named('valid_every_epochs')} and {named('valid_every_updates')} are 0"
    elif not has_data:
        reason = "the task has no validation data"
    else:
        return ""
    limits = f"{named('max_epochs')}, {named('max_updates')} or {named('stop_time')}"
    endless = f", and nothing would end this training: set {limits} in its place"
    advice = ": leave it out" if ends_without_validation(options) else endless
    return f"is {options.patience}, but nothing is validated, as {reason}{advice}"


def schedule_end(options: Training) -> int:
    """Return the number of steps at which a falling schedule reaches its end.

    0 for the others, and where no option gives it in steps: it is then the end of ``max_epochs``.
    """
    return (options.total_num_update or options.max_updates) if options.lr_scheduler in FALLING else 0


def _first_lr(options: Training) -> float:
    """Return the learning rate of the first step; a warm-up from 0 begins with the rate of its second."""
    lr, warmup = options.lr[0], options.warmup_updates
    return (options.warmup_init_lr or lr / warmup) if warmup else lr


def _last_lr(options: Training) -> float:
    """Return what the learning rate comes to if the training goes on, or has as its limit."""
    match options.lr_scheduler:
        case "polynomial_decay" | "cosine" | "wsd":
            return options.end_learning_rate
        case "step" if options.lr_step_gamma < 1:
            return 0.0
        case "inverse_sqrt":
            return math.ulp(0.0)  # it falls to any rate above 0, and never to 0
    return options.lr[-1]


def less_memory(options: Training, world_size: int) -> str:
    """Return the end of a message: the options by which a training takes less memory; empty if it has taken them."""
    ways = [] if options.batch_size in ((1,), "balanced") else ["a smaller --batch-size with a larger --update-freq"]
    if options.strategy == "ddp" and world_size > 1:
        ways.append("--strategy fsdp, which divides the model among the ranks")
    return f"; less is taken by {', or '.join(ways)}" if ways else ""


def uses_compiler(options: Training) -> bool:
    """Return whether the ranks need torch's compiler: to compile the model, or for the tensors of a sharded one."""
    return options.compile != "off" or options.strategy == "fsdp"
