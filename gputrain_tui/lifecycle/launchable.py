"""Checks whether the nodes of a plan can be launched from here, with the fix where they cannot."""

from __future__ import annotations

import shlex

from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.lifecycle.launchers import LAUNCHERS
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight.result import CheckResult
from gputrain_tui.recipe.model import Recipe


def check_launcher(recipe: Recipe, plan: Plan, local: LocalFacts) -> list[CheckResult]:
    """Return an error with its fix where this installation lacks the plan's launcher.

    Args:
        recipe: names the launcher, or the first host elsewhere, that the error points at.
        plan: what it would start.
        local: which hosts are this machine.
    """
    if plan.launcher == "slurm":
        from gputrain_tui.lifecycle import slurm_jobs

        return [slurm_jobs.check(recipe, plan)]
    if plan.launcher in LAUNCHERS:
        return []
    away = next((node for node in plan.nodes if not is_local(node.host, local)), None)
    file = shlex.quote(recipe.source)
    what = "ranks are started from here on this machine only"
    fix = f"start each node by its command: `gputrain plan {file} --shell` prints them, c in the form copies them"
    if away is None:
        fix = "all nodes are this machine: use local or auto"
    if away is None or recipe.cluster.launcher != "auto":
        return [_error(what, fix, key="cluster.launcher", where=recipe.where("cluster", "launcher"))]
    where = recipe.where("cluster", "nodes", away.node, "host")
    what = f"{away.host} is another machine, and {what}"
    return [_error(what, fix, key=f"cluster.nodes[{away.node}].host", where=where)]


def _error(what: str, fix: str, *, key: str, where: str) -> CheckResult:
    return CheckResult(status="error", check="launcher", what=what, fix=fix, key=key, where=where)
