"""Derives the recipe of an evaluation from that of a training; the evaluation is started like any other run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.model import MAX_NAME_CHARS, Recipe
from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import require_consistent

PREFIX = "eval-"
"""Prefix of the recipe names of evaluations, which marks them in a list of runs."""


def evaluation_recipe(
    source: str,
    *,
    overrides: list[str],
    checkpoint: Path,
    run: str,
    split: Literal["test", "valid"] | None,
) -> Recipe:
    """Return the recipe that evaluates a checkpoint on the nodes and with the task of a training recipe.

    Args:
        source: the recipe of the training, a file or ``-``.
        overrides: ``KEY=VALUE`` settings.
        checkpoint: a file, or a folder for its newest good checkpoint.
        run: run that the checkpoint must belong to; empty for any.
        split: evaluated split, ``test`` or ``valid``; None for ``test``, or ``valid`` of a task without one.

    Raises:
        RequestError: the recipe is wrong, runs a script, or has a built-in task without the split.
    """
    recipe = load(source, overrides=overrides)
    if recipe.script is not None:
        raise RequestError(f"{source} runs a script, which evaluates itself; `gputrain eval` evaluates only tasks")
    schema = options_schema(recipe.train.task)
    task_options = None if schema is None else msgspec.convert(dict(recipe.task_options), schema)
    sizes = recipe.train.batch_size
    train = msgspec.structs.replace(
        recipe.train,
        eval_only=str(checkpoint),
        eval_split=split,
        checkpoint_run=run,
        resume=None,
        save_dir=None,
        finetune_from=None,
        finetune_partial=False,
        batch_size=sizes and (max(sizes),),  # one value fits any number of ranks, and all have the same batches
    )
    require_consistent(train, task_options, where=lambda name: {"eval_split": "--split"}.get(name, f"train.{name}"))
    changed = frozenset({("train", "eval_only"), ("train", "eval_split")})
    return dataclasses.replace(
        recipe,
        name=(PREFIX + recipe.name)[:MAX_NAME_CHARS],
        train=train,
        origin=dataclasses.replace(recipe.origin, overridden=recipe.origin.overridden | changed),
    )
