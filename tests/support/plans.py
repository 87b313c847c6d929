"""Plans of small recipes on a fixed machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gputrain_tui.hosts.host_names import LocalFacts
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.plan.planner import Plan, plan
from gputrain_tui.recipe.build import build

HERE = LocalFacts(
    names=frozenset({"box", "10.0.0.1", "fe80::1"}), address="10.0.0.1", free_port=20123, python="/venv/python"
)


def recipe(*nodes: str, cluster: str = "", train: str = "") -> Any:
    tables = "".join(f"[[cluster.nodes]]\n{node}\n" for node in nodes)
    return build(
        f'[cluster]\n{cluster}\n{tables}[train]\ntask = "mnist"\n{train}\n[task]\ndata = "/d"\n', name="r.toml"
    )


def remote_nodes(*gpus: int) -> list[str]:
    """Return nodes by address."""
    return [f'host = "10.0.123.{index + 1}"\ngpus = {count}' for index, count in enumerate(gpus)]


def named_nodes(*gpus: int) -> list[str]:
    """Return nodes by name."""
    return [f'host = "n{index + 1}"\ngpus = {count}' for index, count in enumerate(gpus)]


def plan_for(*nodes: str, has: Mapping[str, Inventory] | None = None, local: LocalFacts = HERE, **tables: str) -> Plan:
    return plan(recipe(*nodes, **tables), has or {}, local=local)
