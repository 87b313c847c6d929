"""``gputrain attach``: opens the console on a run; closing it does not stop the run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from gputrain_tui.commands.shared_flags import RUN_HELP
from gputrain_tui.console import entry


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{RUN_HELP}; default: last")
    entry.add_fps(parser)


def run(args: Namespace) -> int:
    """Show the run until the console is closed."""
    from gputrain_tui.history.run_folders import find
    from gputrain_tui.lifecycle import launchers

    found = find(args.run)  # before the slow import of the console, so that a wrong id is refused fast
    return entry.show(launchers.refresh(found), fps=args.fps)
