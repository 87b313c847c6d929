"""``gputrain wait``: waits until runs have ended, and exits with their exit code."""

from __future__ import annotations

import json
import math
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import closing
from typing import Any

from gputrain_tui.commands.shared_flags import RUN_HELP
from gputrain_tui.headless.closing_report import status_line
from gputrain_tui.history.run_columns import message_text
from gputrain_tui.history.run_folders import Run, find
from gputrain_tui.history.summary import summarize
from gputrain_tui.lifecycle.run_wait import RunWait, WaitResult
from gputrain_tui.output import print_json, print_message, without_nan
from gputrain_tui.report.load_report import read_run_record
from gputrain_tui.tables import printable
from trainer.contract.errors import ExitCode


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return seconds


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)
    text = "wait no longer; a run that goes on then counts as exit code 1"
    parser.add_argument("--timeout", metavar="SECONDS", type=_seconds, help=text)
    parser.add_argument("--json", action="store_true", help="print the runs as `gputrain runs --json` does, at the end")


def run(args: Namespace) -> int:
    """Wait for the runs; return the first of their exit codes, in the order in which they are named, that is not 0.

    A run that has no end, as its supervisor was killed or the time is over, has exit code 1. Ctrl-C ends the wait only.

    Raises:
        RequestError: there is no such run.
    """
    waits = {str(each.dir.path): RunWait(each) for each in map(find, args.runs)}
    results: dict[str, WaitResult] = {}
    deadline = math.inf if args.timeout is None else time.monotonic() + args.timeout
    is_interrupted = is_told = False
    try:
        while True:
            now = time.monotonic()
            for path, wait in waits.items():
                if path not in results and (result := wait.check(now)) is not None:
                    results[path] = result
                    if not args.json:
                        print(end_line(result), flush=True)
            pending = [wait.run.id for path, wait in waits.items() if path not in results]
            if not pending or now >= deadline:
                break
            if not is_told:
                print_message(f"waiting for {', '.join(pending)}; Ctrl-C ends the wait, not the run")
                is_told = True
            time.sleep(min(0.2, max(deadline - now, 0.0)))
    except KeyboardInterrupt:
        is_interrupted = True
    for path, wait in waits.items():
        if path not in results:
            why = "only the wait has ended" if is_interrupted else f"{args.timeout:g} s are over"
            print_message(f"{wait.run.id} is still {wait.run.state}{_reason(wait.run)}: {why}")
    if args.json:
        entries = [_summary(wait.run, results.get(path)) for path, wait in waits.items()]
        print_json(json.dumps(without_nan(entries), ensure_ascii=False))
    if is_interrupted:
        return ExitCode.STOPPED
    codes = [results[path].exit_code if path in results else ExitCode.FAILED for path in waits]
    return next(filter(None, codes), ExitCode.FINISHED)


def _reason(run: Run) -> str:
    """Return why a run has not begun, or waits for its next job, in brackets; empty where that is not known."""
    message = run.status.message if run.state in ("queued", "starting") else None
    return f" ({message})" if message else ""


def _summary(run: Run, result: WaitResult | None) -> dict[str, Any]:
    """Return a run as ``gputrain runs --json`` has it, with the state that the wait knows."""
    entry = summarize(run, now=time.time())
    return entry if result is None else entry | {"state": result.state, "message": result.problem or entry["message"]}


def end_line(result: WaitResult) -> str:
    """Return the last line of the foreground's closing report after the run's id, and why the run did not finish."""
    run = result.run
    if result.problem:
        return printable(f"{run.id} {result.state}: {result.problem}")
    with closing(read_run_record(run)) as live:
        line = "".join(text for text, _ in status_line(live.state, status=live.status, elapsed_s=live.elapsed_s))
    message = message_text(summarize(run, now=time.time()))
    return printable(f"{run.id} {line}{f': {message}' if message and message not in line else ''}")
