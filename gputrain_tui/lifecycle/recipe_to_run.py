"""The recipe of a new run: read from a file, that of the run that it continues, or of the evaluation of a training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui.history.record_tail import early_end
from gputrain_tui.history.recorded_recipe import recorded_table
from gputrain_tui.history.run_folders import Run, find, open_run
from gputrain_tui.lifecycle import run_checkpoints
from gputrain_tui.lifecycle.remote_nodes import remote_node
from gputrain_tui.recipe.build import load as load_recipe
from gputrain_tui.recipe.model import MAX_NAME_CHARS, Recipe
from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.option_rules import RESETS, require_consistent
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_regular


def load(source: str | None, *, overrides: Sequence[str], resume: str | None) -> Recipe:
    """Read the recipe of a new run, or of one that continues another, by its id, a prefix of it or ``last``.

    Raises:
        RequestError: the recipe is wrong, or the run has nothing to continue from.
    """
    if resume is None:
        if source is None:
            raise RequestError(
                "no recipe is named; `gputrain run RECIPE` takes a TOML or JSON file, or - for standard input"
            )
        return load_recipe(source, overrides=list(overrides))
    run = run_checkpoints.find_or_last_trained(resume)
    if evaluated := run_checkpoints.evaluated_checkpoint(run.dir):
        raise RequestError(f"--resume {resume}: {run.id} is an evaluation of {evaluated}; name the run that trained it")
    if run.status.archived is not None:
        raise RequestError(f"--resume {resume}: {run.id} is an archive, which holds no checkpoints")
    if run.state in ("queued", "starting", "running", "stopping"):
        raise RequestError(f"--resume {resume}: {run.id} is still {run.state}; stop it with `gputrain stop {run.id}`")
    checkpoint = run_checkpoints.resumable_checkpoint(run.dir)
    if checkpoint is None:
        raise RequestError(f"--resume {resume}: {run_checkpoints.describe_missing_checkpoint(run)}")
    if run.state == "finished" and source is None and not overrides:
        with naming_the_folder_of(run):
            train = load_recipe(recipe_of(run)).train
        early = early_end(run.dir)
        names: tuple[str, ...] = ("max_updates", "max_epochs", "stop_time", "patience")
        if early:
            names = tuple(name for name in ("stop_time", "min_lr") if name in early) or ("patience",)
        limits = [name for name in names if getattr(train, name)]
        known = f" ({', '.join(f'{name} {getattr(train, name):g}' for name in limits)})" if limits else ""
        change = "lower" if limits == ["min_lr"] else "raise"
        raise RequestError(
            f"--resume {resume}: {run.id} has finished: nothing is left to train; to train further, {change} the limit "
            f"that ended it{known}, such as --set train.{limits[0] if limits else 'max_updates'}=N"
        )
    owner = run_checkpoints.run_named_by(run.dir, checkpoint)
    settings = [*overrides, f"train.resume={checkpoint}", f"train.checkpoint_run={owner}"]
    with naming_the_folder_of(None if source else run):
        source = source or recipe_of(run)
        recipe = load_recipe(source, overrides=settings)
        # The resets of the run's own recipe are done; only overrides reset again.
        done = [f"train.{name}=false" for name in RESETS if getattr(recipe.train, name)]
        if done and source != "-":
            recipe = load_recipe(source, overrides=[*done, *settings])
    remote, first = remote_node(run.dir, 0), recipe.cluster.nodes[0].host
    if remote is not None and first != remote.host:
        raise RequestError(
            f"--resume {resume}: the checkpoints of {run.id} are on {remote.host}, in {checkpoint}, where rank 0 "
            f"reads them, but the first node is {first or 'this machine'}; keep {remote.host} as the first node"
        )
    if resume == "last" and find("last").id != run.id:
        recipe = dataclasses.replace(
            recipe, notes=(*recipe.notes, f"--resume last: {run.id}, the last run that trained")
        )
    return recipe


@contextmanager
def naming_the_folder_of(run: Run | None) -> Iterator[None]:
    """Within the context, add to an error that a run's recipe cannot be read the folder that has its task's file.

    ``run``: None where the recipe is another one.
    """
    try:
        yield
    except RequestError as error:
        hint = "" if run is None else folder_hint(run, here=Path.cwd())
        if not hint:
            raise
        raise RequestError(f"{error}; {hint}") from None


def folder_hint(run: Run, *, here: Path) -> str:
    """Return which folder has the file of a run's task, where that is not ``here``; empty if it is, or not known."""
    source = str(recorded_table(run.dir, "train").get("task", "")).rpartition(":")[0]
    path = Path(source if source.endswith(".py") else f"{source.replace('.', '/')}.py")
    folder = Path(run.status.workdir)
    if not source or path.is_absolute() or not run.status.workdir or folder == here or (here / path).exists():
        return ""
    if not (folder / path).exists():
        return f"{run.id} was started in {folder}, which has no {path} any more"
    return _enter_its_folder(run)


def data_hint(recipe: Recipe, key: str) -> str:
    """Return which folder has the file of a key of ``[task]`` that is missing here: that of the recipe's run.

    Empty if the recipe is not that of a run, the path is not relative, or the run's folder has no such file either.
    """
    table, _, name = key.partition(".")
    value, file = recipe.task_options.get(name), Path(recipe.origin.name)
    run = open_run(file.parent) if file.name == RunDir(file.parent).recipe.name else None
    if table != "task" or run is None or not run.status.workdir or not isinstance(value, str) or value.startswith("/"):
        return ""
    is_there = os.path.exists(f"{run.status.workdir}/{value}")  # noqa: PTH110 - a path raises for a text that is too long
    return _enter_its_folder(run) if is_there else ""


def _enter_its_folder(run: Run) -> str:
    return f"{run.id} was started in {run.status.workdir}, which has it: enter that folder first"


def recipe_of(run: Run) -> str:
    """Return the path of a run's recipe; raise RecordError if it is no regular file that can be read."""
    try:
        os.close(open_regular(run.dir.recipe))
    except OSError as error:
        raise RecordError(f"{run.dir.recipe} cannot be read: {error.strerror}") from None
    return str(run.dir.recipe)


def recipe_of_checkpoint(chosen: run_checkpoints.ChosenCheckpoint, named: str, given: str | None) -> str:
    """Return the recipe ``given``, or that of the run of a checkpoint, which was ``named``.

    Raises:
        RequestError: no recipe is given, and the checkpoint is in no run directory.
        RecordError: the run's recipe cannot be read.
    """
    if given is not None:
        return given
    if chosen.run is None:
        name = "name the recipe of its training with --recipe FILE"
        raise RequestError(f"{named} is not in a run directory: {name}")
    return recipe_of(chosen.run)


def recipe_text(recipe: Recipe) -> str:
    """Return the recipe as TOML for the run directory; as written by the user if nothing was overridden or derived."""
    source = recipe.origin
    as_written = source.format == "toml" and not source.overridden and not source.origins and "name" in source.data
    if as_written:
        return source.text
    from gputrain_tui.recipe.toml_writer import dump_toml  # a slow import (tomlkit) that few runs need

    return dump_toml(recipe)


PREFIX = "eval-"


def evaluation_recipe(
    source: str, *, overrides: list[str], checkpoint: Path, run: str, split: Literal["test", "valid"] | None
) -> Recipe:
    """Return the recipe that evaluates a checkpoint on the nodes and with the task of a training recipe.

    The checkpoint is a file, or a folder for its newest good one; it must belong to ``run``, empty for any. Without
    ``split`` it is ``test``, or ``valid`` of a task without one.

    Raises:
        RequestError: the recipe is wrong, runs a script, or has a built-in task without the split.
    """
    recipe = load_recipe(source, overrides=overrides)
    if recipe.script is not None:
        raise RequestError(f"{source} runs a script, which evaluates itself; `gputrain eval` evaluates only tasks")
    schema = options_schema(recipe.train.task)
    task_options = None if schema is None else msgspec.convert(dict(recipe.task_options), schema)
    sizes = recipe.train.batch_size
    if isinstance(sizes, tuple):
        sizes = (max(sizes),)  # one value fits any number of ranks, and all have the same batches
    train = msgspec.structs.replace(
        recipe.train,
        eval_only=str(checkpoint),
        eval_split=split,
        checkpoint_run=run,
        resume=None,
        save_dir=None,
        finetune_from=None,
        finetune_partial=False,
        batch_size=sizes,
    )
    require_consistent(train, task_options, where=lambda name: {"eval_split": "--split"}.get(name, f"train.{name}"))
    changed = frozenset({("train", "eval_only"), ("train", "eval_split")})
    origin = dataclasses.replace(recipe.origin, overridden=recipe.origin.overridden | changed)
    return dataclasses.replace(recipe, name=(PREFIX + recipe.name)[:MAX_NAME_CHARS], train=train, origin=origin)
