"""``gputrain runs``: what has run and what is running, from the run directories alone."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from gputrain_tui import paths
from gputrain_tui.output import print_json, print_styled
from gputrain_tui.runs import ENDED, Run, UnreadableRun, last_step, list_all
from gputrain_tui.tables import Column, duration, number, printable, table, width
from trainer.errors import ExitCode

NAME = "runs"
HELP = "list past and running runs, newest first"

LONGEST_NAME = 60
"""Characters that a recipe's name takes in the list."""

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


KEYS = (
    "id", "state", "recipe", "world_size", "step", "loss", "started", "ended", "duration_s", "exit_code", "message",
    "run_dir",
)  # fmt: skip
"""What ``describe`` gives."""

UNREADABLE = "unreadable"
"""State of a run of which nothing can be told."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON array of objects")


def run(args: Namespace) -> int:
    """Print the runs."""
    entries = describe_all(*list_all(), now=time.time())
    if args.json:
        print_json(json.dumps(entries, ensure_ascii=False))
    elif entries:
        print_styled(report(entries, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    else:
        print(f"no run in {paths.runs_folder()} yet; start one with `gputrain run RECIPE`", file=sys.stderr)
    return ExitCode.FINISHED


def describe_all(runs: Sequence[Run], unreadable: Sequence[UnreadableRun], *, now: float) -> list[dict[str, Any]]:
    """What is listed of all runs, those last that cannot be read."""
    return [*(describe(run, now=now) for run in runs), *map(describe_unreadable, unreadable)]


def describe_unreadable(run: UnreadableRun) -> dict[str, Any]:
    """What is listed of a run that cannot be read: its name, its folder and why."""
    told = dict.fromkeys(KEYS)
    return told | {"id": run.id, "state": UNREADABLE, "message": run.problem, "run_dir": str(run.dir.path)}


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


def report(entries: Sequence[dict[str, Any]], *, colour: bool = False) -> str:
    """The runs for people, times in their own time zone; a dim line for each that cannot be read."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if colour else ("", "")
    rows = [
        [
            printable(entry["id"]),
            entry["state"],
            printable(entry["recipe"][:LONGEST_NAME]),
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
