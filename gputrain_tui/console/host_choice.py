"""Hosts of the cluster screen, and a recipe's nodes made from chosen GPUs; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run
from gputrain_tui.hosts.host_names import THIS_MACHINE
from gputrain_tui.hosts.inventory import Gpu, Inventory, is_free
from gputrain_tui.plan.planner import Plan
from gputrain_tui.recipe.model import Node
from trainer.contract.errors import RecordError


@dataclass(frozen=True, kw_only=True)
class GpuRank:
    """Rank of one of the user's runs, on a GPU."""

    run: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host of the cluster screen: newest inventory, and state of its survey."""

    name: str
    """Name as in recipes; ``localhost`` for this machine."""
    inventory: Inventory | None = None
    problem: str = ""
    """Error of the last survey, one line; empty if it succeeded."""
    surveying: bool = False
    surveyed_at: float | None = None
    """End of the last survey, monotonic seconds; None: none has ended."""
    inventory_at: float | None = None
    run_ranks: Mapping[int, GpuRank] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return self.name == THIS_MACHINE

    @property
    def display_name(self) -> str:
        """Name shown to the user: this machine's real name instead of ``localhost``."""
        return self.inventory.host if self.is_local and self.inventory is not None else self.name

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs in PCI order."""
        return self.inventory.gpus if self.inventory is not None else ()

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(gpu.index for gpu in self.gpus if is_free(gpu))

    def is_due(self, now: float, *, again_s: float, failed_s: float) -> bool:
        """Return whether to survey it again: ``again_s`` after the last survey, or ``failed_s`` after a failed one."""
        return not self.surveying and (
            self.surveyed_at is None or now - self.surveyed_at >= (failed_s if self.problem else again_s)
        )


def remote_hosts(nodes: Iterable[Node], local: Callable[[str | None], bool]) -> tuple[str, ...]:
    """Return the remote hosts of nodes, each once; ``local`` returns whether a host is this machine."""
    return tuple(dict.fromkeys(node.host for node in nodes if node.host is not None and not local(node.host)))


def active_plans(runs: Iterable[Run]) -> list[tuple[str, Plan]]:
    """Return the ids and plans of active runs."""
    plans = []
    for run in runs:
        if run.state in ("starting", "running", "stopping"):
            with suppress(RecordError):
                plans.append((run.id, read_plan(run.dir)))
    return plans


def ranks_by_gpu(
    inventory: Inventory, plans: Iterable[tuple[str, Plan]], is_this_host: Callable[[str], bool]
) -> dict[int, GpuRank]:
    """Return the ranks of active runs, given by id and plan, on the host of an inventory, by the index of their GPU."""
    by_name = {str(gpu.index): gpu.index for gpu in inventory.gpus} | {gpu.uuid: gpu.index for gpu in inventory.gpus}
    ranks: dict[int, GpuRank] = {}
    for run, plan in plans:
        for node in plan.nodes:
            if is_this_host(node.host):
                for rank, device in zip(node.ranks, node.devices, strict=False):
                    index = by_name.get(str(device))
                    if index is not None:
                        ranks.setdefault(index, GpuRank(run=run, rank=rank))
    return ranks


def nodes_on_gpus(
    chosen: Mapping[str, Sequence[int]], nodes: Sequence[Mapping[str, Any]], *, address: str | None
) -> list[dict[str, Any]]:
    """Return the nodes of a recipe for chosen GPUs: this machine first, then its present hosts, then new ones.

    The host of this machine's node is ``address``; it has none if it is the only node or ``address`` is None.
    """
    alone = len(chosen) == 1

    def written(host: str) -> dict[str, Any]:
        name = (None if alone else address) if host == THIS_MACHINE else host
        return {**({"host": name} if name else {}), "gpus": sorted(chosen[host])}

    order = [str(node["host"]) for node in nodes if node.get("host") in chosen]
    first = [THIS_MACHINE] if THIS_MACHINE in chosen else []
    return [written(host) for host in dict.fromkeys([*first, *order, *chosen])]
