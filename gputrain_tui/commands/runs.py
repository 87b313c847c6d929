"""``gputrain runs``: what has run and what is running, from the run directories alone."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from gputrain_tui import paths
from gputrain_tui.output import print_json
from gputrain_tui.runs import ENDED, Run, last_step, list_runs
from gputrain_tui.tables import Column, duration, number, table
from trainer.errors import ExitCode

NAME = "runs"
HELP = "list past and running runs, newest first"

COLUMNS = (
    Column("run"),
    Column("state"),
    Column("recipe"),
    Column("ranks", right=True),
    Column("step", right=True),
    Column("loss", right=True),
    Column("started"),
    Column("took", right=True),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON array of objects")


def run(args: Namespace) -> int:
    """Print the runs."""
    entries = [describe(run, now=time.time()) for run in list_runs()]
    if args.json:
        print_json(json.dumps(entries, ensure_ascii=False))
    elif entries:
        print(report(entries))
    else:
        print(f"no run in {paths.runs_folder()} yet; start one with `gputrain run RECIPE`", file=sys.stderr)
    return ExitCode.FINISHED


def describe(run: Run, *, now: float) -> dict[str, Any]:
    """What is listed of a run; a value that is not known is None."""
    status = run.status
    step, loss = status.step, status.loss
    if status.status not in ENDED:  # nobody has summed it up yet: rank 0 stands for all
        newest = last_step(run.dir)
        step, loss = (step, loss) if newest is None else (newest.step, newest.loss)
    over = run.state != status.status or status.status in ENDED
    until = status.ended if over else now
    return {
        "id": run.id,
        "state": run.state,
        "recipe": status.recipe,
        "world_size": status.world_size,
        "step": step,
        "loss": loss,
        "started": status.started,
        "ended": status.ended,
        "duration_s": None if until is None else until - status.started,
        "exit_code": status.exit_code,
        "message": status.message,
        "run_dir": str(run.dir.path),
    }


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The runs for people, times in their own time zone."""
    rows = [
        [
            entry["id"],
            entry["state"],
            entry["recipe"],
            str(entry["world_size"]),
            number(entry["step"]),
            number(entry["loss"], 4),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["started"])),
            duration(entry["duration_s"]),
        ]
        for entry in entries
    ]
    return table(COLUMNS, rows)
