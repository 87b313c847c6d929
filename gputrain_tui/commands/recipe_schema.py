"""``gputrain recipe-schema``: prints the JSON Schema of a recipe."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from gputrain_tui.recipe.json_schema import recipe_schema
from trainer.contract.errors import ExitCode


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "task", nargs="?", default="", metavar="TASK", help="your own task, whose options to include: FILE.py:Class"
    )


def run(args: Namespace) -> int:
    """Print the schema."""
    print(json.dumps(recipe_schema(args.task), indent=1))
    return ExitCode.FINISHED
