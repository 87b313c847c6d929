"""``gputrain run``: trains a recipe to the end in the foreground, or starts it and leaves it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace

from gputrain_tui import start
from gputrain_tui.runs import Run, read_status
from trainer.errors import ExitCode, RequestError

NAME = "run"
HELP = "train a recipe to the end, in the foreground or detached"

TAKE_OVER_S = 30.0
"""How long a detached supervisor may take to answer for the run."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="TOML or JSON file, or - for standard input")
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help="override a key of the recipe"
    )
    parser.add_argument("--resume", metavar="RUN", help="continue from the last checkpoint of a stopped or failed run")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print every event as a line of JSON, and nothing else")
    how.add_argument("--detach", action="store_true", help="print the run id and return; the run goes on by itself")


def run(args: Namespace) -> int:
    """Run the recipe; return the run's exit code."""
    recipe = start.load(args.recipe, overrides=args.overrides, resume=args.resume, stdin=sys.stdin)
    prepared = start.prepare(recipe)
    for note in recipe.notes:
        print(f"gputrain: {note}", file=sys.stderr)
    return _detached(prepared) if args.detach else _foreground(prepared, json=args.json)


def _foreground(prepared: start.Prepared, *, json: bool) -> int:
    # The supervisor starts first: what shows the run is imported while it is on its way.
    started, supervisor = start.launch(prepared, leased=True)
    from gputrain_tui import foreground
    from gputrain_tui.state import RunState

    with foreground.Interrupts().caught() as interrupts:
        train, world_size = prepared.recipe.train, prepared.plan.world_size
        state = RunState(world_size=world_size, max_updates=train.max_updates, max_epochs=train.max_epochs)
        view = None if json else foreground.show(state, os.environ)
        code = foreground.follow(
            started,
            supervisor,
            state=state,
            view=view,
            reader=foreground.reader_of(started, json=json),
            interrupts=interrupts,
        )
        return foreground.conclude(started, code, state, narrate=not json, environ=os.environ)


def _detached(prepared: start.Prepared) -> int:
    started, supervisor = start.launch(prepared, leased=False)
    _await_supervisor(started, supervisor)
    print(started.id)
    return ExitCode.FINISHED


def _await_supervisor(started: Run, supervisor: subprocess.Popen[bytes]) -> None:
    """Return once the supervisor answers for the run, so that nobody takes it for lost."""
    deadline = time.monotonic() + TAKE_OVER_S
    while time.monotonic() < deadline:
        status = read_status(started.dir)
        if status is not None and status.status != "starting":
            return
        try:
            supervisor.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        break
    log = started.dir.logs / "supervisor.log"
    raise RequestError(f"the supervisor of {started.id} did not start; {log} says why")
