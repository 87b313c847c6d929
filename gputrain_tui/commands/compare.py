"""``gputrain compare``: compares runs with a first one, and fails on a limit."""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import closing

from msgspec.structs import replace

from gputrain_tui.commands.document_output import add_form, require_output, write_document, write_schema
from gputrain_tui.commands.runs import PIPE_CELLS
from gputrain_tui.commands.shared_flags import RUN_HELP
from gputrain_tui.headless.comparison_text import comparison_lines
from gputrain_tui.history.comparison import DifferingValues
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle.run_checkpoints import find_or_last_trained
from gputrain_tui.output import print_message
from gputrain_tui.report.comparison_in_turns import MIN_ROUNDS, compare_in_turns
from gputrain_tui.report.comparison_limits import check_limits, check_limits_in_turns, parse_condition
from gputrain_tui.report.comparison_page import comparison_page
from gputrain_tui.report.load_report import read_run_record, recipe_differences, run_facts, runs_in_turns
from gputrain_tui.report.run_comparison import Limit, RecordedRun, RunComparison, compare
from gputrain_tui.report.run_report import run_report
from gputrain_tui.report.step_blocks import StepBlocks, without_core_waits
from gputrain_tui.state.finding_text import nan_since
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.record import Step


def add_arguments(parser: ArgumentParser) -> None:
    text = f"the run to compare with, then those that are compared with it; each a {RUN_HELP}"
    parser.add_argument("runs", metavar="RUN", nargs="*", help=text)
    text = (
        "exit with 1 if a run exceeds it beyond its interval: 'step_ms>+5%%', 'throughput<-5%%', "
        "'loss@1000>+0.02', 'peak_memory>+10%%', 'metric:NAME<-0.01', finding:KIND; may be repeated"
    )
    parser.add_argument("--fail-on", metavar="CONDITION", action="append", default=[], help=text)
    text = "compare the newest N runs of one recipe with those of another, by their names: made in turns, A B A B A B"
    parser.add_argument("--rounds", type=int, metavar="N", help=text)
    parser.add_argument("--strict", action="store_true", help="exit with 1 also on a limit that cannot be told")
    parser.add_argument("--anyway", action="store_true", help="compare runs of other hardware or ranks, too")
    add_form(parser)


def run(args: Namespace) -> int:
    """Print the comparison; return exit code 1 if a limit is exceeded, 2 if it cannot be checked.

    Raises:
        RequestError: there is no such run, a condition is none, or the file exists.
    """
    require_output(args)
    if args.schema:
        return write_schema(args, RunComparison)
    if len(args.runs) < 2:
        raise RequestError("compare: name two runs or more, the one to compare with first; see `gputrain runs`")
    conditions = [parse_condition(text) for text in args.fail_on]
    steps = [each.at for each in conditions if each.at is not None]
    if args.rounds is None:
        runs = [find_or_last_trained(name) for name in args.runs]
    elif len(args.runs) == 2 and args.rounds >= MIN_ROUNDS:
        runs = [run for pair in runs_in_turns(args.runs[0], args.runs[1], args.rounds) for run in pair]
    else:
        raise RequestError(
            f"compare --rounds N: N is {MIN_ROUNDS} or more, with two names of recipes, the one to compare with first"
        )
    recorded = [_recorded(each) for each in runs]
    recipe, unknown = _recipe_values(runs)
    if args.rounds is None:
        comparison = check_limits(compare(recorded, recipe=recipe, loss_steps=steps), recorded, conditions)
    else:
        rounds = list(zip(recorded[::2], recorded[1::2], strict=True))
        in_turns = compare_in_turns(rounds, recipe=recipe, loss_steps=steps)
        comparison = check_limits_in_turns(in_turns, rounds, conditions)
    comparison = replace(comparison, recipe_unknown=unknown)
    written = write_document(
        args,
        comparison,
        lines=lambda: comparison_lines(comparison, shutil.get_terminal_size((PIPE_CELLS, 24)).columns),
        page=lambda: comparison_page(comparison, recorded),
    )
    if written != ExitCode.FINISHED:
        return written
    if comparison.incomparable and not args.anyway:
        print_message(f"the runs cannot be compared: {'; '.join(comparison.incomparable)}; --anyway compares them")
        return ExitCode.BAD_REQUEST
    told = [_limit_message(limit) for limit in comparison.limits if limit.exceeded is not False or not limit.decided]
    for line in dict.fromkeys(told):
        print_message(line)
    results = [limit.exceeded for limit in comparison.limits]
    if True in results or (args.strict and not all(limit.decided for limit in comparison.limits)):
        return ExitCode.FAILED
    return ExitCode.BAD_REQUEST if None in results else ExitCode.FINISHED


def _limit_message(limit: Limit) -> str:
    """Return the line about a limit that is exceeded, or not decided; the text names the run that lacks a figure."""
    if limit.exceeded is None:
        return f"{limit.condition} cannot be checked: {limit.text}"
    return f"{limit.run} {'exceeds' if limit.exceeded else 'may exceed'} {limit.condition}: {limit.text}"


def _recorded(run: Run) -> RecordedRun:
    blocks, undisturbed = StepBlocks(), StepBlocks()

    def apply(event: Step) -> None:
        blocks.apply(event)
        undisturbed.apply(without_core_waits(event))

    with closing(read_run_record(run, on_step=apply)) as live:
        report = run_report(live.state, run_facts(live))
        since = nan_since(live.state.root_cause, live.state.findings.values())
    return RecordedRun(report=report, blocks=blocks, undisturbed=undisturbed, nan_since=since)


def _recipe_values(runs: Sequence[Run]) -> tuple[list[DifferingValues], str]:
    """Return the keys that differ, and why they are not known where a recipe cannot be read."""
    try:
        return recipe_differences(runs), ""
    except RequestError as error:
        return [], str(error)
