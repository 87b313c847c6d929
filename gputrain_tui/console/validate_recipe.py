"""Validation of a recipe while it is edited: values, plan and preflight.

It uses the functions of ``gputrain plan`` and ``gputrain run``, queries NVML, and starts a process for a user's own
task: run it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gputrain_tui.lifecycle.prepared import Prepared, check_planned, plan_recipe
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight import CheckResult, NotReadyError
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.form_fields import Field, FieldMessage, find_field, message_key, strip_location
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

    def messages(self, fields: Sequence[Field]) -> dict[str, FieldMessage]:
        """Return the problem, or else the worst result of the preflight, of each field that has one, by key."""
        messages: dict[str, FieldMessage] = {}
        for status in ("note", "warning", "error"):
            for check in reversed(self.results):
                field = find_field(fields, check.key) if check.status == status and check.key else None
                if field is not None:
                    messages[field.key] = FieldMessage(check.text, status)
        if self.problem and (field := find_field(fields, self.key)) is not None:
            messages[field.key] = FieldMessage(strip_location(self.problem))
        return messages


HOSTS_MAX_AGE_S = 20.0
"""Greatest age of the facts of other hosts while a recipe is edited: gathering them takes a second or more."""


def validate_recipe(
    text: str, *, name: str, settings: Sequence[str], task: str = "", hosts_max_age_s: float = HOSTS_MAX_AGE_S
) -> ValidatedRecipe:
    """Build and plan a recipe, ``text``, with changes, ``settings`` as for ``--set``, and run the preflight.

    ``name``: of the recipe in messages; ``task``: ``train.task``, of which a process prints the options if it is not
    built in; ``hosts_max_age_s``: greatest age of the facts of other hosts, seconds.
    """
    result = ValidatedRecipe(settings=tuple(settings), task=task)
    try:
        if task and task not in BUILT_IN:
            result = replace(result, task_options=describe_task(task))
    except RequestError as error:
        return replace(result, problem=f"{name}: train.task is {task!r}: {error}", key="train.task")
    try:
        recipe = build(text, name=name, overrides=result.settings)
        result = replace(result, recipe=recipe)
        planned = plan_recipe(recipe)
        result = replace(result, plan=planned.plan)
        prepared = check_planned(recipe, planned, max_age_s=hosts_max_age_s)
    except NotReadyError as refused:
        return replace(result, plan=refused.plan, results=refused.results)
    except RequestError as error:
        return replace(result, problem=str(error), key=message_key(str(error)))
    return replace(result, prepared=prepared, results=prepared.results)
