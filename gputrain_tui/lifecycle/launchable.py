"""Checks whether the launcher of a plan accepts its nodes."""

from __future__ import annotations

from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight.result import CheckResult
from gputrain_tui.recipe.model import Recipe


def check_launcher(recipe: Recipe, plan: Plan) -> list[CheckResult]:
    """Return whether Slurm would accept the job; no result for other launchers, which the host checks cover."""
    if plan.launcher != "slurm":
        return []
    from gputrain_tui.lifecycle import slurm_jobs

    return [slurm_jobs.check(recipe, plan)]
