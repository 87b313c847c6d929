"""Pure: puts spare hosts in the places of lost ones in a plan; ranks and commands stay."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.hosts.devices import DeviceAllocator, NodeDevices
from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, address_of, is_local
from gputrain_tui.plan.planner import Plan, PlannedNode, devices_text, visible_devices
from trainer.contract.backends import is_nccl
from trainer.contract.errors import RequestError
from trainer.contract.rendezvous_url import parse_rendezvous_url, tcp_url

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.recipe.model import Recipe

VISIBLE = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


def recipe_on(recipe: Recipe, lost: str, spare: str) -> Recipe:
    """Return the recipe with a spare host in the place of a lost one."""
    nodes = [msgspec.structs.replace(node, host=spare) if node.host == lost else node for node in recipe.cluster.nodes]
    return dataclasses.replace(recipe, cluster=msgspec.structs.replace(recipe.cluster, nodes=tuple(nodes)))


def plan_on(
    plan: Plan, recipe: Recipe, lost: str, spare: str, *, inventory: Inventory | None, local: LocalFacts
) -> Plan:
    """Return the plan with a spare host in the place of a lost one: its ranks are there, on devices of the spare.

    If the first node was lost, the ranks meet at the spare. ``inventory`` is the spare's, None if it is not needed.

    Raises:
        RequestError: the spare does not have the devices.
    """
    machine = THIS_MACHINE if is_local(spare, local) else spare
    allocator = DeviceAllocator(
        {} if inventory is None else {machine: inventory},
        share=recipe.launch.share_devices,
        cuda_visible_devices=local.cuda_visible_devices,
    )
    nodes = []
    for node in plan.nodes:
        if node.host == lost:
            where = recipe.where("cluster", "nodes", node.node)
            assigned = allocator.allocate(machine, spare, recipe.cluster.nodes[node.node], where=where)
            node = _placed(node, spare, assigned, plan)
        nodes.append(node)
    if plan.nodes[0].host != lost:
        return msgspec.structs.replace(plan, nodes=nodes)
    address = address_of(spare)
    nodes = [
        msgspec.structs.replace(node, env={**node.env, "MASTER_ADDR": address}) if "MASTER_ADDR" in node.env else node
        for node in nodes
    ]
    url, init_method = parse_rendezvous_url(plan.init_method or ""), plan.init_method
    if url is not None and url.scheme == "tcp" and len({node.host for node in nodes}) > 1:
        init_method = tcp_url(address, url.port)
    return msgspec.structs.replace(plan, nodes=nodes, init_method=init_method)


def _placed(node: PlannedNode, spare: str, assigned: NodeDevices, plan: Plan) -> PlannedNode:
    if len(assigned.devices) != len(node.ranks) or assigned.cpu != ("cpu" in node.devices):
        raise RequestError(f"it has {devices_text(assigned.devices)}, but its ranks need {devices_text(node.devices)}")
    if is_nccl(plan.backend) and assigned.shared:
        raise RequestError("it has fewer GPUs than ranks, and NCCL allows one rank per GPU")
    env = {name: value for name, value in node.env.items() if name not in VISIBLE} | visible_devices(assigned)
    return msgspec.structs.replace(node, host=spare, devices=list(assigned.devices), env=env)
