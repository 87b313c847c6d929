"""Takes the inventories that a plan needs, and plans with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.plan.planner import Plan, plan
from gputrain_tui.recipe.model import Node, Recipe

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.hosts.survey import HostReport


def plan_with_inventories(
    recipe: Recipe,
    *,
    query: Callable[[Sequence[str]], Sequence[HostReport]] | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> tuple[Plan, LocalFacts]:
    """Plan a recipe with the machines as they are now.

    This machine is read when ranks may use its GPUs. Another one is asked over ssh when its node has ``all``, ``free``,
    ``ranks`` or a list of GPUs; a count is believed, and so is a list where the host does not answer.

    Args:
        recipe: what was asked for.
        query: asks hosts for their inventories; over ssh where it is not given.
        warn: takes a line about a host that was believed because it did not answer.

    Raises:
        RequestError: the machines cannot do what the recipe asks for, it contradicts itself, or a host whose GPUs must
            be known does not answer.
    """
    local = local_facts(node.host for node in recipe.cluster.nodes)
    return plan(recipe, inventories_for(recipe, local, query=query, warn=warn), local=local), local


def inventories_for(
    recipe: Recipe,
    local: LocalFacts,
    *,
    query: Callable[[Sequence[str]], Sequence[HostReport]] | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> dict[str, Inventory]:
    """Return what a plan must know of its machines, by host as the plan names it; arguments as of ``plan_with_inventories``.

    Raises:
        DeviceUnavailableError: a host whose GPUs must be known does not answer.
    """
    inventories: dict[str, Inventory] = {}
    if recipe.is_for_slurm:
        return inventories  # which GPUs a node has is Slurm's to say
    nodes = recipe.cluster.nodes
    # Asking the driver takes longer than everything else here, so only for ranks that may use it.
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
    """Whether a node's devices depend on what its machine has."""
    return node.cpu_ranks is None and not isinstance(node.gpus, int)


def _without_inventory(recipe: Recipe, index: int, node: Node, problem: str, warn: Callable[[str], None]) -> None:
    """Accept that a host has no inventory where its node lists its GPUs, else refuse."""
    if isinstance(node.gpus, tuple):
        warn(f"{node.host}: {problem}; its list of GPUs is believed")
        return
    from gputrain_tui.hosts.devices import DeviceUnavailableError

    key = "gpus" if node.gpus is not None else "ranks"
    value: Mapping[str, object] = {"gpus": node.gpus, "ranks": node.ranks}
    unknown = f"is {value[key]!r}, but the GPUs of {node.host} are not known: {problem}"
    where = recipe.where("cluster", "nodes", index, key)
    raise DeviceUnavailableError(where, f"{unknown}; a count or a list of GPUs is believed")
