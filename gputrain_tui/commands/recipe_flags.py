"""Flags for a recipe, shared by all commands that take one."""

from __future__ import annotations

from argparse import ArgumentParser


def add_recipe(parser: ArgumentParser, *, optional: bool = False) -> None:
    """Declare ``RECIPE`` and ``--set``.

    Args:
        parser: of the command.
        optional: whether the command has another way to name a recipe.
    """
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?" if optional else None,
        help="a recipe in TOML or JSON; - reads standard input",
    )
    add_settings(parser)


def add_settings(parser: ArgumentParser) -> None:
    """Declare ``--set``."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a key of the recipe, such as train.lr=0.5; may be repeated",
    )
