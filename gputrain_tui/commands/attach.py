"""``gputrain attach``: the console on a run, running or ended; leaving it leaves the run alone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

NAME = "attach"
HELP = "open the console on a run, running or ended"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="last", help="run id, a unique prefix of one, or `last` (the default)"
    )
    parser.add_argument("--fps", type=float, metavar="N", help="paints a second at most, for slow links")


def run(args: Namespace) -> int:
    """Show the run until the person leaves."""
    from gputrain_tui.runs import find

    found = find(args.run)  # before the console is imported: a wrong id is answered at once
    from gputrain_tui.console import app

    return app.show(found, fps=app.FPS if args.fps is None else args.fps)
