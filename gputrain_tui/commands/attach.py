"""``gputrain attach``: the console on a run, running or ended; leaving it leaves the run alone."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

NAME = "attach"
HELP = "open the console on a run, running or ended"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="last", help="run id, a unique prefix of one, or `last` (the default)"
    )
    add_fps(parser)


def add_fps(parser: ArgumentParser) -> None:
    """Declare the flag of the console itself."""
    parser.add_argument(
        "--fps",
        type=_paints,
        metavar="N",
        help="paints a second at most, 0.2 to 30; default 10, less for slow links",
    )


def _paints(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 30:
        raise ArgumentTypeError(f"{text!r} is not a number from 0.2 to 30")
    return value


def run(args: Namespace) -> int:
    """Show the run until the person leaves."""
    from gputrain_tui.runs import find

    found = find(args.run)  # before the console is imported: a wrong id is answered at once
    from gputrain_tui.console import entry

    return entry.show(found, fps=args.fps)
