"""Pure: plans a run anew on the hosts that are left, with fewer ranks, in the order of the recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.hosts.host_names import LocalFacts, address_of
from gputrain_tui.plan.planner import Plan, PlannedNode, plan as make_plan, with_run_dir
from trainer.contract.errors import RequestError
from trainer.contract.rendezvous_url import parse_rendezvous_url, tcp_url

if TYPE_CHECKING:
    from gputrain_tui.recipe.model import Node, Recipe


def recipe_without(recipe: Recipe, plan: Plan, lost: Collection[str]) -> Recipe:
    """Return the recipe without lost hosts; the nodes that are left keep their devices, their ranks their batch sizes.

    ``plan`` has the nodes of the recipe. If the first node was lost, the ranks meet at the first one that is left.

    Raises:
        RequestError: fewer ranks are left than ``cluster.min_ranks``, by default all.
    """
    left = [node for node in plan.nodes if node.host not in lost]
    count, least = sum(len(node.ranks) for node in left), recipe.cluster.min_ranks or plan.world_size
    if count < least:
        raise RequestError(f"{count} of {plan.world_size} ranks are left, but cluster.min_ranks is {least}")
    sizes = recipe.train.batch_size
    if isinstance(sizes, tuple) and len(sizes) > 1:
        sizes = tuple(sizes[rank] for node in left for rank in node.ranks)
    init_method = recipe.cluster.init_method
    url = parse_rendezvous_url(init_method)
    if url is not None and url.scheme == "tcp" and plan.nodes[0].host in lost:
        init_method = tcp_url(address_of(left[0].host), url.port)
    nodes = tuple(_with_devices(recipe.cluster.nodes[node.node], node) for node in left)
    cluster = msgspec.structs.replace(recipe.cluster, nodes=nodes, init_method=init_method, spare=())
    train = msgspec.structs.replace(recipe.train, batch_size=sizes)
    return dataclasses.replace(recipe, cluster=cluster, train=train, world_size=None)


def _with_devices(node: Node, planned: PlannedNode) -> Node:
    """Return a node that gets the devices again that it has: what is free, or all, may differ now."""
    devices = planned.devices
    if "cpu" in devices:
        return msgspec.structs.replace(node, gpus=None, ranks=None, cpu_ranks=len(devices))
    if isinstance(node.gpus, int) and all(isinstance(device, int) for device in devices):
        return node
    return msgspec.structs.replace(node, gpus=tuple(devices), ranks=None)


def plan_without(plan: Plan, recipe: Recipe, *, run_dir: str, local: LocalFacts) -> Plan:
    """Return the plan of a recipe without lost hosts, as part of the run of the plan before."""
    made = make_plan(recipe, {}, local=local)
    return with_run_dir(msgspec.structs.replace(made, launcher=plan.launcher), run_dir)


def describe_fewer(before: Plan, after: Plan, recipe: Recipe, lost: Collection[str]) -> str:
    """Return the change as a line; ``recipe`` is that of the plan before.

    Each rank keeps its batch size, and the learning rate stays, as no rule of the recipe ties it to the batch.
    """
    text = f"the run goes on without {' and '.join(sorted(lost))}, with {after.world_size} of {before.world_size} ranks"
    if recipe.script is not None:
        return text
    train = recipe.train
    if train.batch_size == "balanced":
        return f"{text}, which divide the same {train.global_batch_size} samples, with the same learning rate"
    if not train.batch_size or train.max_tokens:
        return f"{text}, each with its batch size, and the same learning rate"
    sizes = train.batch_size * before.world_size if len(train.batch_size) == 1 else train.batch_size
    kept = [rank for node in before.nodes if node.host not in lost for rank in node.ranks]
    micro_steps, of = (train.update_freq[0], "step") if len(train.update_freq) == 1 else (1, "micro-step")
    now, then = micro_steps * sum(sizes[rank] for rank in kept), micro_steps * sum(sizes)
    return f"{text}: {now} instead of {then} samples per {of}, the same learning rate"
