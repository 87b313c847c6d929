"""Validates a recipe while it is edited: its values, its plan and the preflight.

The same functions as ``gputrain plan`` and ``gputrain run``; it queries the driver and a user's task, so it
belongs into a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gputrain_tui.lifecycle import start
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight import CheckResult, NotReadyError
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.form_fields import Field, FieldMessage, find_field, message_key
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.task_schema import task_schema
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError


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
    """Build and plan a recipe with changes as ``--set`` takes them, and run the preflight.

    ``name`` stands in messages; the options of a ``task`` that is not built in are asked for. The answers of other
    hosts may be ``hosts_max_age_s`` old.
    """
    found = ValidatedRecipe(settings=tuple(settings), task=task)
    try:
        if task and task not in BUILT_IN:
            found = replace(found, schema=task_schema(task))
    except RequestError as error:
        return replace(found, problem=f"{name}: train.task is {task!r}: {error}", key="train.task")
    try:
        recipe = build(text, name=name, overrides=found.settings)
        found = replace(found, recipe=recipe)
        planned = start.plan_recipe(recipe)
        found = replace(found, plan=planned.plan)
        prepared = start.check_planned(recipe, planned, max_age_s=hosts_max_age_s)
    except NotReadyError as refused:
        return replace(found, plan=refused.plan, results=refused.results)
    except RequestError as error:
        return replace(found, problem=str(error), key=message_key(str(error)))
    return replace(found, prepared=prepared, results=prepared.results)


def remarks_by_field(fields: Sequence[Field], results: Sequence[CheckResult]) -> dict[str, FieldMessage]:
    """Return the worst preflight result of each field, by key."""
    found: dict[str, FieldMessage] = {}
    for status in ("note", "warning", "error"):
        for result in reversed(results):
            concerned = find_field(fields, result.key) if result.status == status and result.key else None
            if concerned is not None:
                found[concerned.key] = FieldMessage(result.text, status)
    return found
