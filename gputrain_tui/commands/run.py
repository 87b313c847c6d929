"""``gputrain run``: trains a recipe to the end in the foreground, or starts it and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from contextlib import closing

from gputrain_tui.commands.shared_flags import add_recipe
from gputrain_tui.lifecycle import start
from gputrain_tui.lifecycle.launchers import launcher
from gputrain_tui.lifecycle.prepared import Prepared, prepare
from gputrain_tui.lifecycle.recipe_to_run import data_hint, load
from gputrain_tui.output import print_message
from gputrain_tui.preflight import NotReadyError, warnings
from gputrain_tui.recipe.model import Recipe
from trainer.contract.errors import ExitCode
from trainer.host.stop_request import StopRequest


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser, optional=True)
    parser.add_argument("--resume", metavar="RUN", help="continue from the last checkpoint of a stopped or failed run")
    add_output(parser)


def add_output(parser: ArgumentParser) -> None:
    """Declare ``--json`` and ``--detach``."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print every event as a line of JSON, and nothing else")
    how.add_argument(
        "--detach", action="store_true", help="print the run id and return; the run continues in the background"
    )


def run(args: Namespace) -> int:
    """Run the recipe; return the run's exit code."""
    recipe = load(args.recipe, overrides=args.overrides, resume=args.resume)
    return run_recipe(recipe, json=args.json, detach=args.detach)


def run_recipe(recipe: Recipe, *, json: bool, detach: bool) -> int:
    """Check, start and show a run; return its exit code."""
    try:
        prepared = prepare(recipe)
        for note in (*recipe.notes, *(result.line for result in warnings(prepared.results))):
            print_message(note)
        if not detach:
            return _foreground(prepared, json=json)
        started = start.launch_detached(prepared).id
        try:
            print(started, flush=True)
        except OSError:
            print_message(f"{started} goes on in the background")
            raise
        return ExitCode.FINISHED
    except NotReadyError as refused:
        for problem in refused.errors:
            print_message("; ".join(filter(None, (problem.line, data_hint(recipe, problem.key)))))
        return ExitCode.REFUSED


def _foreground(prepared: Prepared, *, json: bool) -> int:
    with StopRequest() as stop_request:
        # The supervisor is started first; the imports below run while it starts.
        started, supervisor = start.launch(prepared, leased=True)
        from gputrain_tui.headless import foreground, progress
        from gputrain_tui.headless.safe_stream import SafeStream
        from gputrain_tui.history.run_reader import RunReader
        from gputrain_tui.lifecycle import run_end
        from gputrain_tui.state import RunState

        train, world_size = prepared.recipe.train, prepared.plan.world_size
        out, err = SafeStream(sys.stdout), SafeStream(sys.stderr)
        state = RunState(world_size=world_size, max_updates=train.max_updates, max_epochs=train.max_epochs)
        copied_to = out if json else None
        view = None if json else foreground.progress_view(state, os.environ, err)
        if view is not None:
            logs = "" if prepared.recipe.script is None else "; what the script prints: gputrain logs last --follow"
            placed = f"  {progress.placement(prepared.plan)}{logs}"
            view.introduce([("run ", "dim"), (started.id, "bold"), (placed, "dim")])

        def report(line: str) -> None:
            if view is not None:
                view.print_line([(line, "bold")])
            else:
                err.line(f"gputrain: {line}")

        def follow(supervisor: subprocess.Popen[bytes]) -> int:
            return foreground.follow(
                supervisor,
                run_dir=started.dir,
                state=state,
                view=view,
                reader=reader,
                out=copied_to,
                stop_request=stop_request,
                report=report,
                is_script=prepared.recipe.script is not None,
            )

        with closing(foreground.JsonStream(started, out) if json else RunReader(started.dir)) as reader:
            code = follow(supervisor)
            if code < 0 and not run_end.is_recorded(started.dir):
                # The supervisor was killed, and the nodes of this machine with it. A new one adopts the nodes of other
                # hosts, or records the end of the run.
                supervisor = launcher(prepared.plan.launcher).take_over(started)
                if stop_request.level:
                    supervisor.terminate()  # the killed one had received the stop request
                code = follow(supervisor)
            if code < 0 or code == ExitCode.REFUSED or not run_end.is_recorded(started.dir):
                code = run_end.record_end(started.dir, prepared.plan, code, give_up=lambda: bool(stop_request.risen()))
                state.apply_all(reader.rest())
        if view is not None and (code not in foreground.REFUSALS or foreground.keeps_refused(started)):
            view.open()
        code = foreground.conclude(
            started,
            code,
            state,
            for_people=not json,
            environ=os.environ,
            out=out,
            err=err,
            is_interrupted=lambda: bool(stop_request.level),
        )
        if copied_to is not None and isinstance(copied_to.error, BrokenPipeError):
            raise copied_to.error  # as in any command whose reader closes the pipe, after the end of the run
        return code
