"""The recipe of a new run: read from a file, or that of the run that it continues."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gputrain_tui.history.run_folders import Run, find
from gputrain_tui.lifecycle import run_checkpoints
from gputrain_tui.lifecycle.remote_nodes import remote_node
from gputrain_tui.recipe.build import load as load_recipe
from gputrain_tui.recipe.model import Recipe
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.option_rules import RESETS
from trainer.contract.record.regular_file import open_regular


def load(source: str | None, *, overrides: Sequence[str], resume: str | None) -> Recipe:
    """Read the recipe of a new run, or of one that continues another.

    Args:
        source: file, ``-``, or None for the recipe of the run that is continued.
        overrides: ``KEY=VALUE`` settings.
        resume: the run to continue: an id, a prefix of one, or ``last``.

    Raises:
        RequestError: the recipe is wrong, or the run has nothing to continue from.
    """
    settings = list(overrides)
    if resume is not None:
        run = find(resume)
        if run.status.archived is not None:
            raise RequestError(f"--resume {resume}: {run.id} is an archive, which holds no checkpoints")
        if run.state in ("queued", "starting", "running", "stopping"):
            raise RequestError(
                f"--resume {resume}: {run.id} is still {run.state}; stop it with `gputrain stop {run.id}`"
            )
        found = run_checkpoints.resumable_checkpoint(run.dir)
        if found is None:
            raise RequestError(f"--resume {resume}: {run_checkpoints.describe_missing_checkpoint(run)}")
        if run.state == "finished" and source is None and not overrides:
            raise RequestError(
                f"--resume {resume}: {run.id} has finished: nothing is left to train; "
                "to train further, raise the limit that ended it, such as --set train.max_updates=N"
            )
        settings += [f"train.resume={found}", f"train.checkpoint_run={run_checkpoints.run_named_by(run.dir, found)}"]
        source = source or recipe_of(run)
        recipe = load_recipe(source, overrides=settings)
        # The resets of the run's own recipe are done; only overrides reset again.
        done = [f"train.{name}=false" for name in RESETS if getattr(recipe.train, name)]
        if done and source != "-":
            recipe = load_recipe(source, overrides=[*done, *settings])
        remote, first = remote_node(run.dir, 0), recipe.cluster.nodes[0].host
        if remote is not None and first != remote.host:
            raise RequestError(
                f"--resume {resume}: the checkpoints of {run.id} are on {remote.host}, in {found}, where rank 0 reads "
                f"them, but the first node is {first or 'this machine'}; keep {remote.host} as the first node"
            )
        return recipe
    if source is None:
        raise RequestError(
            "no recipe is named; `gputrain run RECIPE` takes a TOML or JSON file, or - for standard input"
        )
    return load_recipe(source, overrides=settings)


def recipe_of(run: Run) -> str:
    """Return the path of a run's recipe, which must be a regular file.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        os.close(open_regular(run.dir.recipe))
    except OSError as error:
        raise RecordError(f"{run.dir.recipe} cannot be read: {error.strerror}") from None
    return str(run.dir.recipe)


def recipe_text(recipe: Recipe) -> str:
    """Return the recipe as TOML for the run directory; as written by the user if nothing was overridden or derived."""
    source = recipe.origin
    as_written = source.format == "toml" and not source.overridden and not source.origins and "name" in source.data
    if as_written:
        return source.text
    from gputrain_tui.recipe.toml_writer import dump_toml  # a slow import (tomlkit) that few runs need

    return dump_toml(recipe)
