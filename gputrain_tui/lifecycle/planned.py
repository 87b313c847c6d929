"""Plan of a run with the inventories of its machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.plan.planner import Plan, plan
from gputrain_tui.preflight.result import CheckResult, NotReadyError
from gputrain_tui.recipe.model import Node, Recipe

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.hosts.survey import HostReport


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plan, and the facts that it was made from."""

    plan: Plan
    local: LocalFacts
    inventories: Mapping[str, Inventory]
    """Inventories that the plan needed, by host; ``localhost`` is this machine."""
    warnings: tuple[str, ...] = ()
    """A line for each host whose list of GPUs was accepted because it did not answer."""


def plan_recipe(recipe: Recipe) -> Planned:
    """Plan a run that is to start; as ``plan_with_inventories``, but with a missing device as a failed check.

    Raises:
        NotReadyError: a machine does not have the devices.
        RequestError: the recipe contradicts itself.
    """
    from gputrain_tui.hosts.devices import DeviceUnavailableError

    try:
        return plan_with_inventories(recipe)
    except DeviceUnavailableError as error:
        what, _, fix = error.reason.partition("; ")
        key = error.where.rpartition(" ")[2]
        result = CheckResult(status="error", check="GPUs", what=what, fix=fix, key=key, where=error.where)
        raise NotReadyError([result]) from None


def plan_with_inventories(
    recipe: Recipe, *, query: Callable[[Sequence[str]], Sequence[HostReport]] | None = None
) -> Planned:
    """Plan a recipe on its machines in their current state.

    The inventory of this machine is taken if ranks may use its GPUs; that of another host, over ssh, if its node has
    ``all``, ``free``, ``ranks`` or a list of GPUs. A count of GPUs is accepted unchecked, and so is a list if the host
    does not answer.

    Raises:
        RequestError: the machines do not have the devices of the recipe, the recipe contradicts itself, or a host
            whose inventory is needed does not answer.
    """
    local, warnings = local_facts(node.host for node in recipe.cluster.nodes), list[str]()
    inventories = _inventories_for(recipe, local, query=query, warn=warnings.append)
    found = plan(recipe, inventories, local=local)
    return Planned(plan=found, local=local, inventories=inventories, warnings=tuple(warnings))


def _inventories_for(
    recipe: Recipe,
    local: LocalFacts,
    *,
    query: Callable[[Sequence[str]], Sequence[HostReport]] | None,
    warn: Callable[[str], None],
) -> dict[str, Inventory]:
    """Return the inventories that a plan needs, by host as in the plan."""
    inventories: dict[str, Inventory] = {}
    if recipe.is_for_slurm:
        return inventories  # Slurm assigns the GPUs
    nodes = recipe.cluster.nodes
    # NVML takes longer than everything else here: it is read only if ranks may use the GPUs.
    if any(node.cpu_ranks is None and is_local(node.host, local) for node in nodes):
        from gputrain_tui.hosts.inventory import take_inventory

        inventories[THIS_MACHINE] = take_inventory()
    away = {index: node for index, node in enumerate(nodes) if needs_inventory(node) and not is_local(node.host, local)}
    if not away:
        return inventories
    if query is None:
        from gputrain_tui.hosts.survey import query_hosts

        query = query_hosts
    answers = {found.host: found for found in query(list(dict.fromkeys(str(node.host) for node in away.values())))}
    for index, node in away.items():
        found = answers[str(node.host)]
        if found.inventory is not None:
            inventories[found.host] = found.inventory
        else:
            _without_inventory(recipe, index, node, found.problem, warn)
    return inventories


def needs_inventory(node: Node) -> bool:
    """Whether a node's devices depend on the GPUs of its machine."""
    return node.cpu_ranks is None and not isinstance(node.gpus, int)


def _without_inventory(recipe: Recipe, index: int, node: Node, problem: str, warn: Callable[[str], None]) -> None:
    """Warn that a node's list of GPUs is unchecked, as its host did not answer."""
    if isinstance(node.gpus, tuple):
        warn(f"{node.host}: {problem}; its list of GPUs is used unchecked")
        return
    from gputrain_tui.hosts.devices import DeviceUnavailableError

    key = "gpus" if node.gpus is not None else "ranks"
    value: Mapping[str, object] = {"gpus": node.gpus, "ranks": node.ranks}
    unknown = f"is {value[key]!r}, but the GPUs of {node.host} are not known: {problem}"
    where = recipe.where("cluster", "nodes", index, key)
    raise DeviceUnavailableError(where, f"{unknown}; a count or a list of GPUs is accepted unchecked")
