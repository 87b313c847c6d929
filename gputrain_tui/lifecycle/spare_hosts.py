"""Gives a run other hosts between two attempts, after the checks of a launch: spare ones, or fewer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from gputrain_tui.hosts.host_channel import HostError
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.inventory import Inventory, take_inventory
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.hosts.survey import query_hosts
from gputrain_tui.lifecycle.prepared import GLOO_INTERFACE, NCCL_INTERFACE, Planned, run_preflight, with_routes
from gputrain_tui.lifecycle.restart import fresh_init_method
from gputrain_tui.plan.fewer_hosts import describe_fewer, plan_without, recipe_without
from gputrain_tui.plan.planner import Plan
from gputrain_tui.plan.spares import plan_on, recipe_on
from gputrain_tui.preflight import CheckResult, errors
from gputrain_tui.preflight.facts import START_CHECKS
from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.model import ClusterOptions, Recipe
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir, recorded_checkpoints, write_atomically

EXISTS = msgspec.json.Decoder(bool)
OF_LAUNCH = ("save folder", "run folder")
"""Checks of this machine's folders, in which the run has written already."""


class SpareHosts:
    """The hosts of a run after its first attempt: spare ones in the places of lost ones, each once, or fewer."""

    def __init__(self, run_dir: RunDir, options: ClusterOptions) -> None:
        self._dir = run_dir
        self._left = list(options.spare)
        self._min_ranks = options.min_ranks
        self._recipe: Recipe | None = None
        """With the nodes of the plan; None before the first change."""

    def replace(self, plan: Plan, lost: Mapping[str, str]) -> tuple[Plan, list[str]]:
        """Put spare hosts in the places of lost ones, or leave them out; return the plan, and a line for each change.

        The plan is written. ``lost`` has the reason of each host. A lost host, and a spare that fails a check, is not
        used again. Hosts without a spare are left out as far as ``cluster.min_ranks`` allows.

        Raises:
            RequestError: there are too few hosts that pass the checks, or the plan cannot be written.
        """
        reasons = list(lost.values())
        may_shrink = self._min_ranks is not None
        try:
            recipe = self._recipe or (self._read_recipe(plan) if self._left or may_shrink else None)
            while recipe is not None and (may_shrink or len(self._left) >= len(lost)):
                chosen = dict(zip(lost, self._left, strict=False))
                made, placed, refused = self._placed(recipe, plan, chosen, without=lost.keys() - chosen.keys())
                if not refused:
                    del self._left[: len(chosen)]
                    self._write(placed)
                    self._recipe = made
                    changes = [f"{host} is replaced by {spare}" for host, spare in chosen.items()]
                    if gone := lost.keys() - chosen.keys():
                        changes.append(describe_fewer(plan, placed, recipe, gone))
                    return placed, changes
                reasons += [f"spare {spare}: {why}" for spare, why in refused.items()]
                self._left = [spare for spare in self._left if spare not in refused]
        except RequestError as error:  # as of a task whose code has changed, or of too few ranks
            raise RequestError("; ".join([*reasons, str(error)])) from None
        if self._left:
            reasons.append(f"{len(self._left)} spare for {len(lost)} lost hosts")
        raise RequestError("; ".join(reasons))

    def _read_recipe(self, plan: Plan) -> Recipe:
        """Read the recipe of the run; raise where a supervisor that was killed has changed the hosts already."""
        recipe = load(str(self._dir.recipe))
        if len(recipe.cluster.nodes) != len(plan.nodes) or any(node.host in self._left for node in plan.nodes):
            raise RequestError("the run is no longer on the hosts of its recipe, and its supervisor was killed")
        return recipe

    def _write(self, plan: Plan) -> None:
        try:  # a supervisor that adopts the run finds the hosts there
            write_atomically(self._dir.plan, msgspec.json.encode(plan))
        except OSError as error:
            raise RequestError(f"{self._dir.plan} cannot be written: {error.strerror}") from None

    def _placed(
        self, recipe: Recipe, plan: Plan, chosen: Mapping[str, str], *, without: Collection[str]
    ) -> tuple[Recipe, Plan, dict[str, str]]:
        """Return recipe and plan ``without`` some lost hosts, with spares for others, and why spares cannot be used.

        Raises:
            RequestError: too few ranks are left, or a host that is left fails a check.
        """
        before = plan.nodes[0].host
        local = local_facts([*(node.host for node in plan.nodes if node.host not in without), *chosen.values()])
        if without:
            recipe = recipe_without(recipe, plan, without)
            plan = plan_without(plan, recipe, run_dir=str(self._dir.path), local=local)
        refused: dict[str, str] = {}
        first = chosen.get(plan.nodes[0].host)
        if first is None and plan.nodes[0].host != before:
            self._require_checkpoint(before, plan.nodes[0].host, local)
        for lost, spare in chosen.items():
            recipe = recipe_on(recipe, lost, spare)
            try:
                has_gpus = any(node.cpu_ranks is None for node in recipe.cluster.nodes if node.host == spare)
                inventory = _inventory(spare, local) if has_gpus else None
                plan = plan_on(plan, recipe, lost, spare, inventory=inventory, local=local)
                if spare == first:
                    self._require_checkpoint(before, spare, local)
            except (RequestError, HostError) as error:
                refused[spare] = str(error)
        if refused:
            return recipe, plan, refused
        checked = plan
        if plan.init_method is not None:  # the port of the failed attempt may still be taken
            checked = msgspec.structs.replace(plan, init_method=fresh_init_method(plan.init_method))
        results, answers = run_preflight(recipe, Planned(plan=checked, local=local, inventories={}))
        # The next attempt reads the run's own checkpoint, if there is one, not what the first one started from.
        read_before = START_CHECKS.values() if recorded_checkpoints(self._dir) else ()
        for failed in errors(results):
            if failed.check in read_before:
                continue
            about = _spare_of(failed, plan, chosen) or (first if failed.check not in OF_LAUNCH else None)
            if about is not None:
                refused.setdefault(about, failed.text.removeprefix(f"{about}: "))
            elif without and failed.check not in OF_LAUNCH:
                raise RequestError(failed.text)
        found = {answer.host for answer in answers if answer.interface} | set(chosen.values())
        return recipe, with_routes(_without_interfaces(plan, recipe, found), answers), refused

    def _require_checkpoint(self, lost: str, spare: str, local: LocalFacts) -> None:
        """Raise unless the host that gets rank 0 sees the newest checkpoint, or there is none."""
        newest = next(iter(recorded_checkpoints(self._dir)[-1:]), None)
        if newest is None:
            return
        if is_local(spare, local):
            exists = newest.exists()
        else:
            with Ssh().shared_channel(spare) as channel:
                exists = channel.call("exists", EXISTS, path=str(newest))
        if not exists:
            raise RequestError(
                f"the checkpoint {newest} is on {lost} alone; set train.save_dir to a folder that all hosts see"
            )


def _spare_of(error: CheckResult, plan: Plan, chosen: Mapping[str, str]) -> str | None:
    """Return the spare that a failed check is about: its own, or one of a connection to it; None for another host."""
    spares = set(chosen.values())
    if error.host in spares:
        return error.host
    keys = {f"cluster.nodes[{node.node}].host": node.host for node in plan.nodes if node.host in spares}
    return keys.get(error.key)


def _inventory(spare: str, local: LocalFacts) -> Inventory:
    if is_local(spare, local):
        return take_inventory()
    (report,) = query_hosts([spare])
    if report.inventory is None:
        raise RequestError(report.problem)
    return report.inventory


def _without_interfaces(plan: Plan, recipe: Recipe, hosts: set[str]) -> Plan:
    """Return the plan without the network interfaces that were found for hosts; those that the recipe sets stay."""
    nodes = []
    for node in plan.nodes:
        names = {GLOO_INTERFACE, NCCL_INTERFACE} - set(recipe.cluster.of_node(node.node).env)
        kept = {name: value for name, value in node.env.items() if node.host not in hosts or name not in names}
        nodes.append(msgspec.structs.replace(node, env=kept))
    return msgspec.structs.replace(plan, nodes=nodes)
