"""Starting, resuming and stopping runs from the app and its screens, by the functions that the commands use."""

from __future__ import annotations

import asyncio
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.console.screens.console_screen import AppProtocol
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.lifecycle.live_run import LiveRun
    from gputrain_tui.lifecycle.prepared import Prepared


async def launch(console: AppProtocol, prepared: Prepared) -> None:
    """Start a prepared run, detached, and show it.

    The supervisor is started in the app's own thread: the parent death signal (``PR_SET_PDEATHSIG``) fires when the
    thread that started the process ends, and a worker thread ends soon.
    """
    from gputrain_tui.lifecycle import start

    try:
        run, supervisor = start.launch(prepared, leased=False)
    except RequestError as error:
        console.report(str(error), alarm=True)
        return
    console.supervisors = [started for started in console.supervisors if started.poll() is None]
    console.supervisors.append(supervisor)
    console.run_worker(partial(_await_supervisor, console, run, supervisor), group="supervisor")
    await console.open_run(run)


async def _await_supervisor(console: AppProtocol, run: Run, supervisor: subprocess.Popen[bytes]) -> None:
    from gputrain_tui.lifecycle.supervisor_process import await_supervisor

    try:
        await asyncio.to_thread(await_supervisor, run, supervisor, previous=run.status.supervisor)
    except RequestError as error:
        console.report(str(error), alarm=True)


def start_demo(console: AppProtocol) -> None:
    """Launch the demo."""
    console.run_worker(partial(_start, console, "preparing the demo"), group="launch", exclusive=True)


async def _start(console: AppProtocol, announcement: str, *, resume: str | None = None) -> None:
    """Prepare the demo, or a run that resumes another, in a thread, and launch it."""

    def prepared() -> Prepared:
        from gputrain_tui.lifecycle import recipe_to_run
        from gputrain_tui.lifecycle.prepared import prepare
        from gputrain_tui.recipe.new_recipe import example_path

        recipe = str(example_path("demo")) if resume is None else None
        return prepare(recipe_to_run.load(recipe, overrides=(), resume=resume))

    console.report(announcement)
    try:
        ready = await asyncio.to_thread(prepared)
    except RequestError as error:
        console.report(str(error).removeprefix(f"--resume {resume}: "), alarm=True)
    else:
        await launch(console, ready)


def confirm_resume(console: AppProtocol, run: Run) -> None:
    """Resume from a run's newest checkpoint as a new run, after a dialog; without a checkpoint say so."""
    from gputrain_tui.lifecycle.run_checkpoints import describe_missing_checkpoint, resumable_checkpoint

    if run.status.archived is None and resumable_checkpoint(run.dir) is None:
        console.report(describe_missing_checkpoint(run), alarm=True)
        return
    steps = [number for path in run.dir.checkpoints.glob("step_*.pt") if (number := path.stem[5:]).isdecimal()]
    where = f"step {max(map(int, steps)):,}" if steps else "its newest checkpoint"
    consequence = f"{run.status.recipe} continues from {where}, with {_ranks_of(run)}, as a new run."
    start = partial(_start, console, f"preparing to resume {run.id}", resume=run.id)
    resume = partial(console.run_worker, start, group="launch", exclusive=True)
    console.confirm(f"Resume {run.id}?", consequence, yes="Resume it", act=resume)


def _ranks_of(run: Run) -> str:
    return f"{run.status.world_size:,} rank{'s' * (run.status.world_size != 1)}"


async def relaunch(console: AppProtocol, run: Run) -> None:
    """Open a run's recipe on the launch screen; where it was started in another folder, say where its paths begin."""
    from gputrain_tui.lifecycle.recipe_to_run import recipe_of

    try:
        console.session.source = recipe_of(run)
    except RequestError as error:
        console.report(str(error), alarm=True)
    else:
        await console.action_go("launch")
        here = str(Path.cwd())
        if run.status.workdir not in ("", here):
            console.report(f"{run.id} was started in {run.status.workdir}; its relative paths now begin in {here}")


def confirm_stop(console: AppProtocol, run: Run) -> None:
    """Stop a run on every machine, after a dialog."""
    consequence = f"Its {_ranks_of(run)} end on every machine. Checkpoints are kept."
    stop = partial(console.run_worker, partial(_stop, console, run), group="stop")
    console.confirm(f"Stop {run.id}?", consequence, yes="Stop it", act=stop)


def confirm_stop_of_screen(console: AppProtocol, live: LiveRun) -> None:
    """Stop the run of a screen, after a dialog; of one that is over, show its state."""
    if live.over:
        what = "was" if live.status == "deleted" else "has ended:"
        console.report(f"{live.id} {what} {live.status}")
    else:
        confirm_stop(console, live.run)


async def _stop(console: AppProtocol, run: Run) -> None:
    from gputrain_tui.lifecycle.stop_run import stop_by_name
    from trainer.host.stop_request import CONSOLE_SIGNAL

    console.report(f"stopping {run.id}")
    try:
        report, remaining = await asyncio.to_thread(stop_by_name, run.id, CONSOLE_SIGNAL)
    except RequestError as error:
        console.report(str(error), alarm=True)
    else:
        console.report(report, alarm=bool(remaining))
