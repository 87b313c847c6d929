"""Validates a recipe while it is edited: its values, its plan and the preflight.

The same functions as ``gputrain plan`` and ``gputrain run``; it may look at the driver and ask a user's task, so it
belongs into a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gputrain_tui.lifecycle import start
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight import CheckResult, NotReadyError
from gputrain_tui.recipe import model as recipes
from gputrain_tui.recipe.draft import Field, FieldMessage, find_field, message_key
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.task_schema import task_schema
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.preflight import CheckResult


@dataclass(frozen=True, kw_only=True)
class ValidatedRecipe:
    """Result of a validation."""

    settings: tuple[str, ...]
    """The changes that were applied."""
    recipe: Recipe | None = None
    """None where it is invalid."""
    plan: Plan | None = None
    prepared: start.Prepared | None = None
    """Ready to be launched; None while a check fails."""
    problem: str = ""
    """One line: what is wrong with the recipe itself."""
    key: str = ""
    """Key of the problem; empty for none."""
    results: tuple[CheckResult, ...] = ()
    """Results of the preflight; empty where the recipe is invalid."""
    task: str = ""
    schema: type[Any] | None = None
    """The options of the user's own task."""


HOSTS_MAX_AGE_S = 20.0
"""How old the answers of other hosts may be while a recipe is edited: asking again takes a second or more."""


def validate_recipe(
    text: str, *, name: str, settings: Sequence[str], task: str = "", hosts_max_age_s: float = HOSTS_MAX_AGE_S
) -> ValidatedRecipe:
    """Build and plan a recipe, and run the preflight.

    Args:
        text: of the recipe.
        name: what messages call it.
        settings: changes, as ``--set`` takes them.
        task: its task, whose options are asked for when it is not built in.
        hosts_max_age_s: how old the answers of other hosts may be.
    """
    told = tuple(settings)
    schema: type[Any] | None = None
    if task and task not in BUILT_IN:
        try:
            schema = task_schema(task)
        except RequestError as error:
            return ValidatedRecipe(settings=told, problem=f"{name}: train.task is {task!r}: {error}", key="train.task")
    recipe: Recipe | None = None
    plan: Plan | None = None
    try:
        recipe = recipes.build(text, name=name, overrides=told)
        planned = start.planned(recipe)
        plan = planned.plan
        prepared = start.checked(recipe, planned, max_age_s=hosts_max_age_s)
    except NotReadyError as refused:
        return ValidatedRecipe(
            settings=told, recipe=recipe, plan=refused.plan, results=refused.results, task=task, schema=schema
        )
    except RequestError as error:
        message = str(error)
        return ValidatedRecipe(
            settings=told, recipe=recipe, plan=plan, problem=message, key=message_key(message), task=task, schema=schema
        )
    return ValidatedRecipe(
        settings=told,
        recipe=recipe,
        plan=plan,
        prepared=prepared,
        results=prepared.results,
        task=task,
        schema=schema,
    )


def remarks_by_field(fields: Sequence[Field], results: Sequence[CheckResult]) -> dict[str, FieldMessage]:
    """Return the worst preflight result of each field, by key."""
    found: dict[str, FieldMessage] = {}
    for status in ("note", "warning", "error"):
        for result in reversed(results):
            concerned = find_field(fields, result.key) if result.status == status and result.key else None
            if concerned is not None:
                found[concerned.key] = FieldMessage(result.text, status)
    return found
