"""Starts a prepared run, for commands and console alike: writes the run directory, and has the launcher start it."""

from __future__ import annotations

import subprocess

import msgspec

from gputrain_tui.history.run_folders import Run, create
from gputrain_tui.lifecycle.launchers import launcher
from gputrain_tui.lifecycle.prepared import Prepared
from gputrain_tui.lifecycle.recipe_to_run import recipe_text
from gputrain_tui.plan.planner import with_run_dir
from gputrain_tui.preflight.result import NotReadyError, error
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir


def launch(prepared: Prepared, *, leased: bool) -> tuple[Run, subprocess.Popen[bytes]]:
    """Write the run directory and start the run's supervisor in a session of its own, or submit the run as a job.

    Closing the standard input, a pipe, of the returned process of a leased run ends the run.

    Raises:
        NotReadyError: the run directory cannot be written, or the scheduler refuses the run.
    """
    run = _create(prepared)
    return run, launcher(prepared.plan.launcher).start(run, prepared.recipe, prepared.plan, leased=leased)


def launch_detached(prepared: Prepared) -> Run:
    """Write the run directory and start the run, to continue without this process; return once it has started.

    Raises:
        NotReadyError: the run directory cannot be written, or the scheduler refuses the run.
        RequestError: the supervisor did not start.
    """
    run = _create(prepared)
    launcher(prepared.plan.launcher).start_detached(run, prepared.recipe, prepared.plan)
    return run


def _create(prepared: Prepared) -> Run:
    recipe = prepared.recipe

    def planned(run_dir: RunDir) -> bytes:
        return msgspec.json.encode(with_run_dir(prepared.plan, str(run_dir.path)))

    try:
        return create(recipe.name, world_size=prepared.plan.world_size, recipe_toml=recipe_text(recipe), plan=planned)
    except RequestError as refused:
        what, _, fix = str(refused).partition("; ")
        raise NotReadyError([error("run folder", what, fix)]) from None
