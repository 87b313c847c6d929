"""The one way to start a run, for the command and the console: check, plan, write the run directory, hand over.

What can be known to be wrong is found here, before there is a run directory.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from gputrain_tui import recipe as recipes
from gputrain_tui.addresses import local_facts, meeting_problem
from gputrain_tui.launchers import launcher
from gputrain_tui.plan import THIS_MACHINE, LocalFacts, Plan, is_local, plan, with_run_dir
from gputrain_tui.processes import ProcessIdentity
from gputrain_tui.recipe import Recipe
from gputrain_tui.runs import Run, create, find, open_run, read_status
from trainer.errors import RequestError
from trainer.record import RunDir

if TYPE_CHECKING:
    from gputrain_tui.warm import WarmStart


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A checked recipe and its plan; nothing is started yet."""

    recipe: Recipe
    plan: Plan


def load(source: str | None, *, overrides: Sequence[str], resume: str | None, stdin: IO[str] | None) -> Recipe:
    """Read the recipe of a new run, or of one that continues another.

    Args:
        source: file, ``-``, or None for the recipe of the run that is continued.
        overrides: ``KEY=VALUE`` settings.
        resume: the run to continue: an id, a prefix of one, or ``last``.
        stdin: what ``-`` reads.

    Raises:
        RequestError: the recipe is wrong, or the run has nothing to continue from.
    """
    settings = list(overrides)
    if resume is not None:
        run = find(resume)
        if run.state in ("starting", "running", "stopping"):
            raise RequestError(
                f"--resume {resume}: {run.id} is still {run.state}; stop it with `gputrain stop {run.id}`"
            )
        folder = run.dir.checkpoints
        if not folder.is_dir() or not any(folder.iterdir()):
            raise RequestError(f"--resume {resume}: {run.id} has no checkpoint in {folder}")
        if run.state == "finished" and source is None and not overrides:
            raise RequestError(
                f"--resume {resume}: {run.id} has finished, nothing is left to train; "
                "to train it further raise what ended it, such as --set train.max_updates=N"
            )
        settings.append(f"train.resume={folder}")
        source = source or str(run.dir.recipe)
    if source is None:
        raise RequestError(
            "no recipe is named; `gputrain run RECIPE` takes a TOML or JSON file, or - for standard input"
        )
    return recipes.load(source, overrides=settings, stdin=stdin)


def prepare(recipe: Recipe) -> Prepared:
    """Plan a run and refuse what cannot work on this machine.

    Raises:
        RequestError: the machines do not fit, data is missing, or the ranks could not meet.
    """
    hosts = [node.host for node in recipe.cluster.nodes]
    facts = local_facts(hosts)
    planned = _planned(recipe, facts)
    launcher(planned.launcher)
    _check_script(recipe)
    _check_data(recipe)
    if problem := meeting_problem(planned, facts):
        raise RequestError(problem)
    return Prepared(recipe=recipe, plan=planned)


def _planned(recipe: Recipe, facts: LocalFacts) -> Plan:
    here = [node for node in recipe.cluster.nodes if is_local(node.host, facts)]
    if all(node.cpu_ranks is not None for node in here):
        return plan(recipe, {}, local=facts)
    from gputrain_tui.inventory import take_inventory  # asks the driver, which ranks on CPUs do not wait for

    return plan(recipe, {THIS_MACHINE: take_inventory()}, local=facts)


def _check_script(recipe: Recipe) -> None:
    """Refuse a script that is not there; every node of a run sees it under the same path."""
    if recipe.script is None:
        return
    path = Path(recipe.script.script)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else f"does not exist in {Path.cwd()}"
        raise RequestError(f"{recipe.where('train', 'script')}: {path} {what}; name a Python file")


def _check_data(recipe: Recipe) -> None:
    """Refuse data that is not there; a user's own task is asked by its ranks, who have torch."""
    from trainer.tasks.registry import BUILT_IN, check_data, options_schema

    if recipe.train.task in BUILT_IN:
        schema = options_schema(recipe.train.task)
        assert schema is not None
        try:
            check_data(msgspec.convert(dict(recipe.task_options), schema))
        except RequestError as error:
            raise RequestError(f"{recipe.source}: {error}") from None


def launch(prepared: Prepared, *, leased: bool, warm: WarmStart | None = None) -> tuple[Run, subprocess.Popen[bytes]]:
    """Write the run directory and start its supervisor in a session of its own.

    Args:
        prepared: what to run.
        leased: the run ends with the pipe that is the supervisor's standard input.
        warm: takes the run over if it has somebody who waits for one.

    Raises:
        RequestError: the run directory cannot be written.
    """
    recipe = prepared.recipe

    def planned(run_dir: RunDir) -> bytes:
        return msgspec.json.encode(with_run_dir(prepared.plan, str(run_dir.path)))

    run = create(recipe.name, world_size=prepared.plan.world_size, recipe_toml=_kept(recipe), plan=planned)
    return run, start_supervisor(run.dir, leased=leased, warm=warm)


def start_supervisor(
    run_dir: RunDir, *, leased: bool, adopting: bool = False, warm: WarmStart | None = None
) -> subprocess.Popen[bytes]:
    """Start the process that answers for a run, or takes over one whose supervisor was killed."""
    words = [str(run_dir.path), *(["--lease"] if leased else []), *(["--adopt"] if adopting else [])]
    if warm is not None and (waiting := warm.launch(words)) is not None:
        return waiting
    with (run_dir.logs / "supervisor.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "gputrain_tui.supervisor", *words],
            stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def adopt(run: Run) -> Run:
    """Give a run whose supervisor was killed a new one, and return once that answers for it or has ended it."""
    status = read_status(run.dir) or run.status
    supervisor = start_supervisor(run.dir, leased=False, adopting=True)
    await_supervisor(run, supervisor, was=status.supervisor)
    return open_run(run.dir.path) or run


def await_supervisor(
    run: Run, supervisor: subprocess.Popen[bytes], *, was: ProcessIdentity | None, patience_s: float = 30.0
) -> None:
    """Return once a supervisor answers for the run, so that nobody takes it for lost.

    Args:
        run: the run.
        supervisor: the process that was started for it.
        was: who answered before.
        patience_s: how long it may take.

    Raises:
        RequestError: it did not start.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        status = read_status(run.dir)
        if status is not None and status.supervisor != was:
            return
        try:
            supervisor.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        break
    status = read_status(run.dir)
    if status is None or status.supervisor == was:
        raise RequestError(f"the supervisor of {run.id} did not start; {run.dir.logs / 'supervisor.log'} says why")


def _kept(recipe: Recipe) -> str:
    """The recipe as the run keeps it: loading it again gives the same run."""
    source = recipe.origin
    as_written = source.format == "toml" and not source.overridden and not source.origins and "name" in source.data
    return recipe.text if as_written else recipes.dump_toml(recipe)
