"""``gputrain eval``: evaluates a checkpoint on a split, as a run that does not train."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from gputrain_tui.commands import run as run_command
from gputrain_tui.commands.shared_flags import add_checkpoint, add_settings
from gputrain_tui.lifecycle.recipe_to_run import evaluation_recipe, naming_the_folder_of, recipe_of_checkpoint
from gputrain_tui.lifecycle.run_checkpoints import choose_checkpoint
from trainer.contract.errors import RequestError


def add_arguments(parser: ArgumentParser) -> None:
    add_checkpoint(parser)
    text = "split to evaluate; default: test, or valid where the task has no test split"
    parser.add_argument("--split", choices=("test", "valid"), help=text)
    parser.add_argument("--recipe", metavar="FILE", help="recipe to use instead of the run's own")
    add_settings(parser)
    run_command.add_output(parser)


def run(args: Namespace) -> int:
    """Evaluate the checkpoint; return the run's exit code."""
    chosen = choose_checkpoint(args.named, args.checkpoint)
    if chosen.of_torch:
        raise RequestError(
            f"{args.named} is a folder of torch.distributed.checkpoint; `gputrain eval` evaluates checkpoints of "
            "gputrain. train.finetune_from, predict and export --to safetensors take such a folder"
        )
    source = recipe_of_checkpoint(chosen, args.named, args.recipe)
    with naming_the_folder_of(chosen.run if args.recipe is None else None):
        recipe = evaluation_recipe(
            source, overrides=args.overrides, checkpoint=chosen.path, run=chosen.run_id, split=args.split
        )
    notes = (*recipe.notes, f"evaluating {chosen.description}, {chosen.path}")
    return run_command.run_recipe(replace(recipe, notes=notes), json=args.json, detach=args.detach)
