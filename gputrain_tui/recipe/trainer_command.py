"""Translates a command of our own trainer, ``python -m trainer --task …``, into a recipe's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gputrain_tui.recipe.model import LAUNCH_OPTIONS
from gputrain_tui.recipe.task_description import describe_task
from gputrain_tui.shell_words import shell_joined
from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.options import Distributed, Training
from trainer.contract.schema import Option, check_value, describe, read_flags

CLUSTER = {"distributed_backend": "backend", "distributed_port": "port"}
"""Options of the launch and their keys in ``[cluster]``; ``[train]`` has others, and the plan computes the rest."""


@dataclass(frozen=True, kw_only=True)
class TrainerCommand:
    """The tables of a recipe that such a command is."""

    node: dict[str, Any]
    cluster: dict[str, Any]
    train: dict[str, Any]
    task: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_trainer_command(arguments: Sequence[str]) -> TrainerCommand:
    """Return the tables of the arguments of ``python -m trainer``.

    Raises:
        RequestError: a flag is not known, or its value is wrong.
    """
    launch_options, train_options = describe(Distributed), describe(Training)
    launch, rest = read_flags(arguments, launch_options)
    train, rest = read_flags(rest, train_options)
    task_options = describe_task(train.get("task", ""))
    task, rest = read_flags(rest, task_options)
    if rest:
        flags = [option.flag for option in (*launch_options, *train_options, *task_options)]
        raise RequestError(f"{quoted(rest[0])} is no option of the trainer or its task{nearest(rest[0], flags)}")
    launched = _checked(launch, launch_options)
    ranks, on_cpu = launched.pop("distributed_world_size", None), launched.pop("cpu", False)
    node = {"cpu_ranks": ranks or 1} if on_cpu else {"ranks": ranks} if ranks else {"gpus": "all"}
    cluster = {CLUSTER[name]: launched.pop(name) for name in list(launched) if name in CLUSTER}
    for_train = {name: launched.pop(name) for name in LAUNCH_OPTIONS if name in launched}
    left_out = [option.flag for option in launch_options if option.name in launched]
    note = f"left out, as gputrain decides it at the start: {shell_joined(left_out)}"
    return TrainerCommand(
        node=node,
        cluster=cluster,
        train=_checked(train, train_options) | for_train,
        task=_checked(task, task_options),
        notes=[note] if left_out else [],
    )


def _checked(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """Return values as a recipe has them."""
    found = {}
    for option in options:
        if option.name in values:
            value = check_value(option, values[option.name], where=option.flag)
            if isinstance(value, tuple):
                value = list(value) if len(value) != 1 else value[0]
            found[option.name] = value
    return found
