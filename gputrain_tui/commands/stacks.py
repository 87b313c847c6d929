"""``gputrain stacks``: prints where the code of a run's ranks is, on all hosts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from gputrain_tui.commands.shared_flags import RUN_HELP, add_ranks, chosen_ranks
from gputrain_tui.history.run_folders import find
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle.stack_request import collect_stacks, recorded_stacks
from gputrain_tui.output import print_json, print_message
from gputrain_tui.state.rank_stacks import StackGroup, frame_text, group_stacks
from gputrain_tui.tables import ranks_text
from trainer.contract.errors import ExitCode


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{RUN_HELP}; default: last")
    add_ranks(parser)
    parser.add_argument("--threads", action="store_true", help="also the threads beside the main one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Print the stacks; return exit code 1 if a rank did not answer.

    Raises:
        RequestError: there is no such run or rank, or the run directory cannot be written.
        RecordError: the record of an ended run cannot be read.
    """
    found = find(args.run)
    ranks = chosen_ranks(args, found, command="stacks") or list(range(found.status.world_size))
    ended = found.state in ENDED
    answers = recorded_stacks(found, ranks) if ended else collect_stacks(found, ranks)
    groups = group_stacks(answers)
    silent = sorted(set(ranks) - {answer.rank for answer in answers})
    if args.json:
        print_json(msgspec.json.encode(_json(found.id, groups, silent)).decode())
    else:
        print("\n\n".join("\n".join(_lines(group, threads=args.threads)) for group in groups))
    if ended:
        recorded = "these were recorded" if groups else "it has none in its record"
        print_message(f"{found.id} has ended ({found.state}); {recorded}")
    elif silent:
        print_message(f"no answer from {ranks_text(silent)}: ended, or its node agent or host does not answer")
    complete = not ended and not silent and all(group.threads for group in groups)
    return ExitCode.FINISHED if complete else ExitCode.FAILED


def _lines(group: StackGroup, *, threads: bool) -> list[str]:
    """Return a group as lines: its ranks and where they are, then the calls, the innermost first."""
    place = "; ".join(text for text in (group.line, group.problem) if text)
    lines = [f"{ranks_text(group.ranks)}: {place}"]
    for number, thread in enumerate(group.threads):
        if number and not threads:
            count = len(group.threads) - 1
            lines.append(f"  {count} other thread{'s' if count > 1 else ''}: --threads shows them")
            break
        if number:
            lines.append(f"  {thread.name}")
        lines += [f"  {'>' if frame.user else ' '} {frame_text(frame)}" for frame in thread.frames]
    return lines


def _json(run: str, groups: list[StackGroup], silent: list[int]) -> dict[str, Any]:
    return {
        "run": run,
        "groups": [
            {
                "ranks": group.ranks,
                "line": group.line,
                "problem": group.problem,
                "threads": [
                    {"name": thread.name, "frames": [msgspec.structs.asdict(frame) for frame in thread.frames]}
                    for thread in group.threads
                ],
            }
            for group in groups
        ],
        "silent": silent,
    }
