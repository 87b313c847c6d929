"""``gputrain runs``: lists running and ended runs from their directories."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from gputrain_tui import paths
from gputrain_tui.history.runs import ENDED, list_all, read_job
from gputrain_tui.history.summary import MAX_NAME_CHARS, UNREADABLE, summarize_runs
from gputrain_tui.output import print_json, print_styled
from gputrain_tui.tables import TableColumn, duration, number, printable, table, width
from trainer.contract.errors import ExitCode

NAME = "runs"
HELP = "list past and running runs, newest first"


COLUMNS = (
    TableColumn("run"),
    TableColumn("state"),
    TableColumn("recipe"),
    TableColumn("ranks", right=True),
    TableColumn("step", right=True),
    TableColumn("loss", right=True),
    TableColumn("started"),
    TableColumn("took", right=True),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON array of objects")


def run(args: Namespace) -> int:
    """Print the runs."""
    runs, unreadable = list_all()
    if any(run.state not in ENDED and read_job(run.dir) is not None for run in runs):
        from gputrain_tui.lifecycle.slurm_jobs import refreshed

        runs = [refreshed(run) for run in runs]
    entries = summarize_runs(runs, unreadable, now=time.time())
    if args.json:
        print_json(json.dumps(entries, ensure_ascii=False))
    elif entries:
        print_styled(report(entries, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    else:
        print(f"no run in {paths.runs_folder()} yet; start one with `gputrain run RECIPE`", file=sys.stderr)
    return ExitCode.FINISHED


def report(entries: Sequence[dict[str, Any]], *, colour: bool = False) -> str:
    """Return the runs as a table with local times; a dim line for each unreadable one."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if colour else ("", "")
    rows = [
        [
            printable(entry["id"]),
            entry["state"],
            printable(entry["recipe"][:MAX_NAME_CHARS]),
            str(entry["world_size"]),
            number(entry["step"]),
            number(entry["loss"], 4),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["started"])),
            duration(entry["duration_s"]),
        ]
        for entry in entries
        if entry["state"] != UNREADABLE
    ]
    lines = table(COLUMNS, rows).splitlines()
    wide = max((width(row[0]) for row in rows), default=0)
    for entry in entries:
        if entry["state"] == UNREADABLE:
            name = printable(entry["id"])
            text = f"{name}{' ' * max(wide - width(name), 0)}  {UNREADABLE}: {printable(entry['message'])}"
            lines.append(f"{dim}{text}{plain}")
    return "\n".join(lines)
