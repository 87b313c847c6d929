"""``gputrain stop``: stops a run on all nodes and reports the processes left."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from gputrain_tui.lifecycle.stop_run import stop_by_name
from gputrain_tui.tables import printable
from trainer.contract.errors import ExitCode


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, a unique prefix of one, or `last`")


def run(args: Namespace) -> int:
    """Stop the run and wait until it has ended; return exit code 1 if processes are left."""
    report, left = stop_by_name(args.run)
    print(printable(report))
    return ExitCode.FAILED if left else ExitCode.FINISHED
