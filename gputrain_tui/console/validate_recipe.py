"""Validation of a recipe while it is edited: values, plan and preflight.

It uses the functions of ``gputrain plan`` and ``gputrain run``, queries NVML, and starts a process for a user's own
task: run it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gputrain_tui.lifecycle.planned import plan_recipe
from gputrain_tui.lifecycle.prepared import Prepared, check_planned
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight import CheckResult, NotReadyError
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.form_fields import Field, FieldMessage, find_field, message_key
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.task_description import describe_task
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError
from trainer.contract.schema import Option


@dataclass(frozen=True, kw_only=True)
class ValidatedRecipe:
    """Result of a validation."""

    settings: tuple[str, ...]
    recipe: Recipe | None = None
    plan: Plan | None = None
    prepared: Prepared | None = None
    """The run to launch; None if a check fails."""
    problem: str = ""
    """Error of the recipe itself, one line; empty: none."""
    key: str = ""
    """Key that ``problem`` is about; empty: none."""
    results: tuple[CheckResult, ...] = ()
    """Results of the preflight; empty if the recipe is invalid."""
    task: str = ""
    task_options: Sequence[Option] | None = None
    """Options of a user's own task; None for a built-in one."""


HOSTS_MAX_AGE_S = 20.0
"""Greatest age of the facts of other hosts while a recipe is edited: gathering them takes a second or more."""


def validate_recipe(
    text: str, *, name: str, settings: Sequence[str], task: str = "", hosts_max_age_s: float = HOSTS_MAX_AGE_S
) -> ValidatedRecipe:
    """Build and plan a recipe with changes, and run the preflight.

    Args:
        text: the recipe's file.
        name: name of the recipe in messages.
        settings: changes, as for ``--set``.
        task: ``train.task``; a process prints the options of a task that is not built in.
        hosts_max_age_s: greatest age of the facts of other hosts.
    """
    found = ValidatedRecipe(settings=tuple(settings), task=task)
    try:
        if task and task not in BUILT_IN:
            found = replace(found, task_options=describe_task(task))
    except RequestError as error:
        return replace(found, problem=f"{name}: train.task is {task!r}: {error}", key="train.task")
    try:
        recipe = build(text, name=name, overrides=found.settings)
        found = replace(found, recipe=recipe)
        planned = plan_recipe(recipe)
        found = replace(found, plan=planned.plan)
        prepared = check_planned(recipe, planned, max_age_s=hosts_max_age_s)
    except NotReadyError as refused:
        return replace(found, plan=refused.plan, results=refused.results)
    except RequestError as error:
        return replace(found, problem=str(error), key=message_key(str(error)))
    return replace(found, prepared=prepared, results=prepared.results)


def remarks_by_field(fields: Sequence[Field], results: Sequence[CheckResult]) -> dict[str, FieldMessage]:
    """Return the worst preflight result of each field as a message, by key."""
    found: dict[str, FieldMessage] = {}
    for status in ("note", "warning", "error"):
        for result in reversed(results):
            concerned = find_field(fields, result.key) if result.status == status and result.key else None
            if concerned is not None:
                found[concerned.key] = FieldMessage(result.text, status)
    return found
