"""Plan of a run with the inventories of its machines, and its checks: the preflight, and whether it would ever end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.hosts.devices import DeviceUnavailableError
from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.lifecycle.launchers import launcher
from gputrain_tui.plan.planner import Plan, plan as make_plan, with_rendezvous
from gputrain_tui.preflight import CheckResult, NotReadyError, collect_facts, errors, run_checks
from gputrain_tui.preflight.result import error, warning
from gputrain_tui.recipe.model import Recipe
from trainer.contract.backends import is_nccl
from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import require_end
from trainer.contract.schema import check

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.hosts.survey import HostReport
    from gputrain_tui.preflight.collect_hosts import HostAnswer
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with the network interface of a backend; after ``=`` NCCL takes a name, not a prefix."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plan, and the facts that it was made from."""

    plan: Plan
    local: LocalFacts
    inventories: Mapping[str, Inventory]
    """Inventories that the plan needed, by host; ``localhost`` is this machine."""
    warnings: tuple[str, ...] = ()
    """A line for each host whose list of GPUs was accepted because it did not answer."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why hosts whose inventories are needed did not answer; with one the plan is for the checks only."""


def plan_recipe(recipe: Recipe) -> Planned:
    """Plan a run that is to be checked: a missing device is a failed check, and so is a host that does not answer.

    Raises:
        NotReadyError: a machine does not have the devices.
        RequestError: the recipe contradicts itself.
    """
    try:
        return plan_with_inventories(recipe, allow_silent=True)
    except DeviceUnavailableError as error:
        what, _, fix = error.reason.partition("; ")
        key = error.where.rpartition(" ")[2]
        result = CheckResult(status="error", check="GPUs", what=what, fix=fix, key=key, where=error.where)
        raise NotReadyError([result]) from None


def plan_with_inventories(recipe: Recipe, *, allow_silent: bool = False) -> Planned:
    """Plan a recipe on its machines in their current state.

    The inventory of this machine is taken if ranks may use its GPUs; that of another host, over ssh, if its node has
    ``all``, ``free``, ``ranks`` or a list of GPUs. A count of GPUs is accepted unchecked, and so is a list if the host
    does not answer. ``allow_silent``: a host without an answer whose inventory is needed gets ranks on its CPU, and is
    one of the plan's ``problems``.

    Raises:
        RequestError: the machines do not have the devices of the recipe, the recipe contradicts itself, or a host
            whose inventory is needed does not answer.
    """
    local = local_facts(node.host for node in recipe.cluster.nodes)
    inventories: dict[str, Inventory] = {}
    warnings = []
    nodes = [] if recipe.is_for_slurm else list(recipe.cluster.nodes)  # Slurm assigns the GPUs
    # NVML takes longer than everything else here: it is read only if ranks may use the GPUs.
    if any(node.cpu_ranks is None and is_local(node.host, local) for node in nodes):
        from gputrain_tui.hosts.inventory import take_inventory

        inventories[THIS_MACHINE] = take_inventory()
    unknown = {
        index: str(node.host)
        for index, node in enumerate(nodes)
        if node.cpu_ranks is None and not isinstance(node.gpus, int) and not is_local(node.host, local)
    }
    reports = _query(list(dict.fromkeys(unknown.values())))
    for index, host in unknown.items():
        node, report = nodes[index], reports[host]
        if report.inventory is not None:
            inventories[host] = report.inventory
        elif isinstance(node.gpus, tuple):
            warnings.append(f"{host}: {report.problem}; its list of GPUs is used unchecked")
        elif allow_silent:
            ranks = node.ranks if isinstance(node.ranks, int) else 1
            nodes[index] = msgspec.structs.replace(node, gpus=None, ranks=None, cpu_ranks=ranks)
        else:
            key, value = ("gpus", node.gpus) if node.gpus is not None else ("ranks", node.ranks)
            reason = f"is {value!r}, but the GPUs of {host} are not known: {report.problem}"
            where = recipe.where("cluster", "nodes", index, key)
            raise DeviceUnavailableError(where, f"{reason}; a count or a list of GPUs is accepted unchecked")
    problems = {host: report.problem for host, report in reports.items() if report.inventory is None}
    if allow_silent and problems:
        cluster = msgspec.structs.replace(recipe.cluster, nodes=tuple(nodes))
        recipe = replace(recipe, cluster=cluster)
    plan = make_plan(recipe, inventories, local=local)
    return Planned(plan=plan, local=local, inventories=inventories, warnings=tuple(warnings), problems=problems)


def _query(hosts: Sequence[str]) -> dict[str, HostReport]:
    if not hosts:
        return {}
    from gputrain_tui.hosts.survey import query_hosts  # loaded where hosts are asked

    return {report.host: report for report in query_hosts(hosts)}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Recipe that passed the preflight, and its plan."""

    recipe: Recipe
    plan: Plan
    results: tuple[CheckResult, ...] = ()
    """Results of the preflight, none of which is an error."""


def prepare(recipe: Recipe) -> Prepared:
    """Plan a run and check its machines; raise as ``plan_recipe`` and ``check_planned`` do."""
    return check_planned(recipe, plan_recipe(recipe))


def check_planned(recipe: Recipe, planned: Planned, *, max_age_s: float = 0.0) -> Prepared:
    """Run the preflight checks of a planned run.

    Raises:
        NotReadyError: a check failed.
        RequestError: the training would make no step, or never end.
    """
    if problem := endless_reason(recipe):
        raise RequestError(problem)
    results, answers = _preflight_with_spare(recipe, planned, max_age_s=max_age_s)
    if errors(results):
        raise NotReadyError(results, plan=None if planned.problems else planned.plan)
    return Prepared(recipe=recipe, plan=with_routes(planned.plan, answers), results=tuple(results))


def _preflight_with_spare(
    recipe: Recipe, planned: Planned, *, max_age_s: float
) -> tuple[list[CheckResult], tuple[HostAnswer, ...]]:
    """Check the machines, and whether the spare hosts answer, at the same time; return what ``run_preflight`` does."""
    others = [warning("other hosts", line) for line in planned.warnings]
    spare = recipe.cluster.spare if planned.plan.launcher == "ssh" else ()
    if not spare or max_age_s:  # while a form is edited, they are not asked after every key
        results, answers = run_preflight(recipe, planned, max_age_s=max_age_s)
        return results + others, answers
    from concurrent.futures import ThreadPoolExecutor  # milliseconds, which few runs need

    with ThreadPoolExecutor(1, thread_name_prefix="spare") as pool:
        asked = pool.submit(_query, spare)
        results, answers = run_preflight(recipe, planned)
        reports = asked.result().values()
    fix = "it cannot replace a lost host before it answers"
    silent = [each for each in reports if each.problem]
    others += [warning("spare", each.problem, fix, key="cluster.spare", host=each.host) for each in silent]
    return results + others, answers


def run_preflight(
    recipe: Recipe, planned: Planned, *, max_age_s: float = 0.0
) -> tuple[list[CheckResult], tuple[HostAnswer, ...]]:
    """Check the machines of a planned run; return the results, and the answers of its hosts over ssh."""
    chosen = launcher(planned.plan.launcher)
    results = chosen.check(recipe, planned.plan)
    problems = planned.problems
    answers = chosen.query_hosts(recipe, planned.plan, planned.local, max_age_s=max_age_s, problems=problems)
    answered = {
        answer.host: answer.facts.inventory for answer in answers if answer.facts is not None and not answer.is_local
    }
    queried = frozenset(answer.host for answer in answers)
    facts = collect_facts(
        recipe, planned.plan, planned.local, inventories={**answered, **planned.inventories}, queried=queried
    )
    results += run_checks(recipe, planned.plan, facts, local=planned.local)
    if answers:
        from gputrain_tui.preflight.host_checks import check_hosts

        results += check_hosts(recipe, planned.plan, answers)
    unasked = problems.keys() - {answer.host for answer in answers}
    results += [error("ssh", problems[host], host=host) for host in sorted(unasked)]
    return results, answers


def with_routes(plan: Plan, answers: Sequence[HostAnswer]) -> Plan:
    """Return the plan with the routes that its hosts have between them.

    Each host's interface towards the others is in its environment, unless the user has set one, and the ranks meet at
    the first host's address if a host does not know its name, as with one that only the user's ``~/.ssh/config`` has.
    """
    if not answers:
        return plan
    from gputrain_tui.preflight.collect_hosts import address_for_name  # loaded where hosts were asked

    if address := address_for_name(answers):
        plan = with_rendezvous(plan, host=address)
    interfaces = {answer.host: answer.interface for answer in answers if answer.interface}
    if not interfaces:
        return plan
    names = {GLOO_INTERFACE: "{}", **({NCCL_INTERFACE: "={}"} if is_nccl(plan.backend) else {})}
    nodes = []
    for node in plan.nodes:
        interface = interfaces.get(node.host)
        own = {name: form.format(interface) for name, form in names.items() if interface and name not in os.environ}
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
