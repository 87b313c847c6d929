"""What the console asks about a recipe while it is edited: is it right, what would it start, could that start now.

The same functions as ``gputrain plan`` and ``gputrain run``; it may look at the driver and ask a user's task, so it
belongs into a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gputrain_tui import recipe as recipes
from gputrain_tui.plan import Plan
from gputrain_tui.preflight import NotReadyError, Result
from gputrain_tui.recipe import Recipe
from gputrain_tui.recipes.draft import key_of
from gputrain_tui.recipes.task_options import task_schema
from gputrain_tui.running import start
from trainer.errors import RequestError
from trainer.tasks.registry import BUILT_IN


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found out about a recipe."""

    settings: tuple[str, ...]
    """The changes with which it was looked at."""
    recipe: Recipe | None = None
    """None where it says something impossible."""
    plan: Plan | None = None
    prepared: start.Prepared | None = None
    """Ready to be launched; None while something is in the way."""
    problem: str = ""
    """One line: what is wrong with the recipe itself."""
    key: str = ""
    """The key that it concerns; empty for none."""
    results: tuple[Result, ...] = ()
    """What the preflight found; empty where the recipe itself is wrong."""
    task: str = ""
    schema: type[Any] | None = None
    """The options of the user's own task."""


def examined(text: str, *, name: str, settings: Sequence[str], task: str = "") -> Examined:
    """Look at a recipe and at this machine.

    Args:
        text: of the recipe.
        name: what messages call it.
        settings: changes, as ``--set`` takes them.
        task: its task, whose options are asked for when it is not built in.
    """
    told = tuple(settings)
    schema: type[Any] | None = None
    if task and task not in BUILT_IN:
        try:
            schema = task_schema(task)
        except RequestError as error:
            return Examined(settings=told, problem=f"{name}: train.task is {task!r}: {error}", key="train.task")
    recipe: Recipe | None = None
    plan: Plan | None = None
    try:
        recipe = recipes.build(text, name=name, overrides=told)
        planned = start.planned(recipe)
        plan = planned.plan
        prepared = start.checked(recipe, planned)
    except NotReadyError as refused:
        return Examined(
            settings=told, recipe=recipe, plan=refused.plan, results=refused.results, task=task, schema=schema
        )
    except RequestError as error:
        message = str(error)
        return Examined(
            settings=told, recipe=recipe, plan=plan, problem=message, key=key_of(message), task=task, schema=schema
        )
    return Examined(
        settings=told,
        recipe=recipe,
        plan=plan,
        prepared=prepared,
        results=prepared.results,
        task=task,
        schema=schema,
    )
