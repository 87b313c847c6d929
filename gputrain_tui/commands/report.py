"""``gputrain report``: tells of a run on one page."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from contextlib import closing
from pathlib import Path

import msgspec

from gputrain_tui.commands.shared_flags import RUN_HELP
from gputrain_tui.headless.foreground import use_colour
from gputrain_tui.headless.progress import paint
from gputrain_tui.headless.report_text import report_lines
from gputrain_tui.history.run_folders import find
from gputrain_tui.output import print_json, print_message, print_styled
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.page import page_html
from gputrain_tui.report.run_charts import run_charts
from gputrain_tui.report.run_report import RunReport, run_report
from gputrain_tui.report.step_blocks import StepBlocks
from trainer.contract.errors import ExitCode
from trainer.contract.output_file import OutputError, output_file, require_place

PAGE_CELLS = 100
"""Width of the text, where the terminal is no narrower."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{RUN_HELP}; default: last")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--html", action="store_true", help="print one HTML page with charts, that opens from disk")
    form.add_argument("--schema", action="store_true", help="print the JSON Schema of --json")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to a file instead of standard output")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def run(args: Namespace) -> int:
    """Print the report, or write it to a file.

    Raises:
        RequestError: there is no such run, or the file exists.
    """
    if args.output is not None:
        require_place(args.output, force=args.force)
    text = _schema() if args.schema else _text(args)
    if args.output is not None:
        try:
            with output_file(args.output) as file:
                file.write((text + "\n").encode())
        except OutputError as error:
            print_message(str(error))
            return ExitCode.FAILED
    elif args.json or args.schema:
        print_json(text)
    elif args.html:
        print(text)
    else:
        print_styled(text)
    return ExitCode.FINISHED


def _text(args: Namespace) -> str:
    blocks = StepBlocks()
    with closing(read_run_record(find(args.run), on_step=blocks.apply)) as live:
        report = run_report(live.state, run_facts(live))
        if args.html:
            charts = run_charts(live.series, live.hardware, blocks, live.metrics, loss_unit=report.loss_unit)
            return page_html(report, charts)
        if args.json:
            return msgspec.json.encode(report).decode()
        colour = args.output is None and use_colour(sys.stdout.isatty(), os.environ)
        width = min(shutil.get_terminal_size((PAGE_CELLS, 24)).columns, PAGE_CELLS)
        return "\n".join(paint(line, colour=colour) for line in report_lines(report, live.state, width))


def _schema() -> str:
    return msgspec.json.encode(msgspec.json.schema(RunReport)).decode()
