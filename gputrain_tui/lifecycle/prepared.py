"""Checks of a planned run: the preflight of its machines, and whether its training would ever end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.lifecycle.launchers import launcher
from gputrain_tui.lifecycle.planned import Planned, plan_recipe
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight import CheckResult, NotReadyError, collect_facts, errors, run_checks
from gputrain_tui.preflight.result import warning
from gputrain_tui.recipe.model import Recipe
from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import require_end
from trainer.contract.schema import check

if TYPE_CHECKING:
    from gputrain_tui.preflight.host_facts import HostAnswer

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with the network interface of a backend; after ``=`` NCCL takes a name, not a prefix."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Recipe that passed the preflight, and its plan."""

    recipe: Recipe
    plan: Plan
    results: tuple[CheckResult, ...] = ()
    """Results of the preflight, none of which is an error."""


def prepare(recipe: Recipe) -> Prepared:
    """Plan a run and check its machines.

    Raises:
        NotReadyError: the recipe is right, but the machines are not ready for it.
        RequestError: the recipe contradicts itself, or would never end.
    """
    return check_planned(recipe, plan_recipe(recipe))


def check_planned(recipe: Recipe, planned: Planned, *, max_age_s: float = 0.0) -> Prepared:
    """Run the preflight checks of a planned run.

    Raises:
        NotReadyError: a check failed.
        RequestError: the training would make no step, or never end.
    """
    if problem := endless_reason(recipe):
        raise RequestError(problem)
    chosen = launcher(planned.plan.launcher)
    results = chosen.check(recipe, planned.plan)
    answers = chosen.query_hosts(recipe, planned.plan, planned.local, max_age_s=max_age_s)
    answered = {
        answer.host: answer.facts.inventory for answer in answers if answer.facts is not None and not answer.is_local
    }
    facts = collect_facts(
        recipe,
        planned.plan,
        planned.local,
        inventories={**answered, **planned.inventories},
        queried=frozenset(answer.host for answer in answers),
    )
    results += run_checks(recipe, planned.plan, facts, local=planned.local)
    if answers:
        from gputrain_tui.preflight.host_checks import check_hosts

        results += check_hosts(recipe, planned.plan, answers)
    results += [warning("other hosts", line) for line in planned.warnings]
    if errors(results):
        raise NotReadyError(results, plan=planned.plan)
    return Prepared(recipe=recipe, plan=with_interfaces(planned.plan, answers), results=tuple(results))


def with_interfaces(plan: Plan, answers: Sequence[HostAnswer]) -> Plan:
    """Return the plan with each host's interface towards the others in its environment, unless the user has set one."""
    interfaces = {answer.host: answer.interface for answer in answers if answer.interface}
    if not interfaces:
        return plan
    names = {GLOO_INTERFACE: "{}", **({NCCL_INTERFACE: "={}"} if plan.backend == "nccl" else {})}
    nodes = []
    for node in plan.nodes:
        found = interfaces.get(node.host)
        own = {name: form.format(found) for name, form in names.items() if found and name not in os.environ}
        nodes.append(msgspec.structs.replace(node, env={**own, **node.env}))
    return msgspec.structs.replace(plan, nodes=nodes)


def endless_reason(recipe: Recipe) -> str:
    """Return in one line why a training would make no step or never end; empty if it does both, and for a script."""
    if recipe.script is not None:
        return ""
    schema = options_schema(recipe.train.task)
    task_options = None if schema is None else check(schema, recipe.task_options, where=str)
    try:
        require_end(
            recipe.train,
            task_options,
            where=lambda name: recipe.where("train", name),
            named=lambda name: f"train.{name}",
        )
    except RequestError as error:
        return str(error)
    return ""
