"""Flags that name a recipe and override its keys, shared by all commands that read one."""

from __future__ import annotations

from argparse import ArgumentParser


def add_recipe(parser: ArgumentParser, *, optional: bool = False) -> None:
    """Declare ``RECIPE`` and ``--set``.

    Args:
        parser: parser of the command.
        optional: whether ``RECIPE`` may be omitted.
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
