"""``gputrain predict``: predictions of a checkpoint for inputs of a file or of standard input, as JSON lines."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace

from gputrain_tui.commands.shared_flags import add_checkpoint, add_settings
from gputrain_tui.lifecycle.recipe_to_run import naming_the_folder_of, recipe_of_checkpoint
from gputrain_tui.lifecycle.run_checkpoints import choose_checkpoint
from gputrain_tui.plan.planner import task_flags
from gputrain_tui.recipe.build import load as load_recipe
from trainer.contract.errors import ExitCode, RequestError


def add_arguments(parser: ArgumentParser) -> None:
    add_checkpoint(parser)
    text = "lines of text or of JSON objects, or a file of the task's own format; default: standard input"
    parser.add_argument("--input", metavar="FILE|-", default="-", help=text)
    parser.add_argument("--recipe", metavar="FILE", help="recipe to use instead of the run's own")
    add_settings(parser)


def run(args: Namespace) -> int:
    """Print the predictions; return the exit code."""
    chosen = choose_checkpoint(args.named, args.checkpoint, here=True)
    source = recipe_of_checkpoint(chosen, args.named, args.recipe)
    with naming_the_folder_of(chosen.run if args.recipe is None else None):
        recipe = load_recipe(source, overrides=args.overrides)
    if recipe.script is not None:
        raise RequestError(f"{source} runs a script; `gputrain predict` needs a task, which offers predict()")
    # A process of its own, as this one never imports torch, which reads checkpoints.
    argv = [sys.executable, "-P", "-m", "trainer.predict_inputs", str(chosen.path), "--program=gputrain"]
    argv += [f"--input={args.input}", f"--run={chosen.run_id}"]
    argv.append(f"--note=predicting with {chosen.description}, {chosen.path}")
    training = [f"--task={recipe.train.task}", f"--seed={recipe.train.seed}", *task_flags(recipe.task_options)]
    try:
        code = subprocess.run([*argv, "--", *training]).returncode
    except KeyboardInterrupt:
        return ExitCode.STOPPED
    return code if code in set(ExitCode) else ExitCode.FAILED
