"""``gputrain check``: runs the preflight checks of a recipe; starts nothing."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import msgspec

from gputrain_tui.commands.shared_flags import add_recipe
from gputrain_tui.lifecycle.prepared import prepare
from gputrain_tui.output import print_json, print_message, print_styled
from gputrain_tui.preflight import CheckResult, NotReadyError, summary
from gputrain_tui.preflight.result import by_hosts
from gputrain_tui.recipe.build import load
from gputrain_tui.tables import printable, width
from trainer.contract.errors import ExitCode

SIGNS = {"ok": ("✓", "32"), "note": ("·", "2"), "warning": ("!", "33"), "error": ("✗", "1;31")}
"""Sign and colour (SGR parameters) of a result, by its status."""


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")


def run(args: Namespace) -> int:
    """Print the results of all checks; return exit code 3 if one is an error."""
    recipe = load(args.recipe, overrides=args.overrides)
    try:
        results, ready = prepare(recipe).results, True
    except NotReadyError as refused:
        results, ready = refused.results, False
    if args.json:
        print_json(msgspec.json.encode({"recipe": recipe.name, "ready": ready, "results": results}).decode())
    else:
        for note in recipe.notes:
            print_message(note)
        print_styled(report(results, recipe.name, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return ExitCode.FINISHED if ready else ExitCode.REFUSED


def report(results: Sequence[CheckResult], name: str, *, colour: bool = False) -> str:
    """Return the results as text: one line each, with fix and key below; one for hosts with the same result."""
    wide = max(width(result.check) for result in results)
    lines = [f"{printable(name)}: {summary(results)}"]
    for result in by_hosts(results):
        sign, sgr = SIGNS[result.status]
        shown = f"\x1b[{sgr}m{sign}\x1b[0m" if colour else sign
        space = " " * (wide - width(result.check))
        host = f"{result.host}: " if result.host else ""
        lines.append(f"{shown} {result.check}{space}  {printable(host + result.what)}")
        if result.fix:
            key = f"  ({result.where})" if result.where else ""
            lines.append(f"  {' ' * wide}  {printable('→ ' + result.fix + key)}")
        elif result.where and result.status in ("warning", "error"):
            lines.append(f"  {' ' * wide}  {printable(f'({result.where})')}")
    return "\n".join(lines)
