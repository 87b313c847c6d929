"""Checks whether the nodes of a plan can be launched from here, with the fix where they cannot."""

from __future__ import annotations

from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight.result import CheckResult
from gputrain_tui.recipe.model import Recipe


def check_launcher(recipe: Recipe, plan: Plan) -> list[CheckResult]:
    """Return the answer of Slurm where it is to launch; hosts over ssh answer for themselves."""
    if plan.launcher != "slurm":
        return []
    from gputrain_tui.lifecycle import slurm_jobs

    return [slurm_jobs.check(recipe, plan)]
