"""From a recipe to a plan on this machine: looks at what ``plan`` may not look at, then asks it."""

from __future__ import annotations

from gputrain_tui.addresses import local_facts
from gputrain_tui.inventory import Inventory, take_inventory
from gputrain_tui.plan import THIS_MACHINE, LocalFacts, Plan, is_local, plan
from gputrain_tui.recipe import Recipe


def plan_here(recipe: Recipe) -> tuple[Plan, LocalFacts]:
    """Plan a recipe with this machine as it is now; other machines are believed to have what the recipe says.

    Raises:
        RequestError: the machines cannot do what the recipe asks for, or it contradicts itself.
    """
    local = local_facts(node.host for node in recipe.cluster.nodes)
    inventories: dict[str, Inventory] = {}
    # Asking the driver takes longer than everything else here, so only for ranks that may use it.
    if any(node.cpu_ranks is None and is_local(node.host, local) for node in recipe.cluster.nodes):
        inventories[THIS_MACHINE] = take_inventory()
    return plan(recipe, inventories, local=local), local
