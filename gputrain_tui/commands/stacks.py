"""``gputrain stacks``: prints where the code of a run's ranks is, on all hosts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import msgspec

from gputrain_tui.commands.shared_flags import RUN_HELP, add_ranks, chosen_ranks
from gputrain_tui.history.lost_run import lost_text
from gputrain_tui.history.plan_file import read_job
from gputrain_tui.history.run_folders import find
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle import launchers
from gputrain_tui.lifecycle.stack_request import collect_stacks, recorded_stacks
from gputrain_tui.output import print_json, print_message
from gputrain_tui.state.rank_stacks import StackGroup, group_lines, group_stacks
from gputrain_tui.tables import ranks_text
from trainer.contract.errors import ExitCode
from trainer.contract.record import ThreadStack


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{RUN_HELP}; default: last")
    add_ranks(parser)
    parser.add_argument("--threads", action="store_true", help="also the threads beside the main one")
    text = "also the native frames, by py-spy or pystack of each host, which stop a rank for a part of a second"
    parser.add_argument("--native", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Print the stacks; return exit code 1 if a rank did not answer, also as the run waits in a queue.

    Raises:
        RequestError: there is no such run or rank, or the run directory cannot be written.
        RecordError: the record of an ended run cannot be read.
    """
    found = find(args.run)
    if found.state == "queued":
        found = launchers.refresh(found)
    ranks = chosen_ranks(args, found, command="stacks") or list(range(found.status.world_size))
    ended = found.state in ENDED
    waits = found.state == "queued"
    if ended or waits:
        answers, when = recorded_stacks(found, ranks) if ended else ([], "")
    else:
        answers, when = collect_stacks(found, ranks, native=args.native), ""
    groups = group_stacks(answers)
    silent = sorted(set(ranks) - {answer.rank for answer in answers})
    if args.json:
        print_json(msgspec.json.encode(_json(found.id, groups, silent)).decode())
    elif groups:
        shown = group_lines(groups, threads=args.threads)
        print("\n\n".join("\n".join(text for text, _ in lines) for lines in shown))
    if ended:
        recorded = f"these were recorded {when}" if groups else "it has none in its record"
        others = f", and none of {ranks_text(silent)}" if groups and silent else ""
        print_message(f"{found.id} has ended ({found.state}); {recorded}{others}")
    elif waits:
        job = read_job(found.dir)
        name = "" if job is None else f" as job {job.number}"
        print_message(f"{found.id} waits in Slurm's queue{name}: no rank runs")
    elif silent:
        lost = lost_text(found.dir, found.status)
        why = f"{found.id} is lost: {lost}" if lost else "ended, or its node agent or host does not answer"
        print_message(f"no answer from {ranks_text(silent)}: {why}")
    complete = not ended and not silent and all(group.threads for group in groups)
    return ExitCode.FINISHED if complete else ExitCode.FAILED


def _json(run: str, groups: list[StackGroup], silent: list[int]) -> dict[str, Any]:
    return {
        "run": run,
        "groups": [
            {
                "ranks": group.ranks,
                "hosts": group.hosts,
                "line": group.line,
                "problem": group.problem,
                "threads": _threads_json(group.threads),
                "workers": _threads_json(group.workers),
                "native": _threads_json(group.native),
                "native_problem": group.native_problem,
                "collectives": [
                    {"ranks": ranks, "last": [msgspec.structs.asdict(each) for each in last]}
                    for ranks, last in group.collectives
                ],
            }
            for group in groups
        ],
        "silent": silent,
    }


def _threads_json(threads: Sequence[ThreadStack]) -> list[dict[str, Any]]:
    return [
        {"name": thread.name, "frames": [msgspec.structs.asdict(frame) for frame in thread.frames]}
        for thread in threads
    ]
