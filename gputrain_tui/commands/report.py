"""``gputrain report``: tells of a run on one page."""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from contextlib import closing

from gputrain_tui.commands.document_output import add_form, require_output, write_document, write_schema
from gputrain_tui.commands.shared_flags import RUN_HELP
from gputrain_tui.headless.report_text import report_lines
from gputrain_tui.history.run_folders import find
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.page import report_page
from gputrain_tui.report.report_fields import RunReport
from gputrain_tui.report.run_charts import run_charts
from gputrain_tui.report.run_report import run_report
from gputrain_tui.report.step_blocks import StepBlocks

PAGE_CELLS = 100
"""Width of the text, where the terminal is no narrower."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{RUN_HELP}; default: last")
    add_form(parser)


def run(args: Namespace) -> int:
    """Print the report, or write it to a file.

    Raises:
        RequestError: there is no such run, or the file exists.
    """
    require_output(args)
    if args.schema:
        return write_schema(args, RunReport)
    blocks = StepBlocks()
    with closing(read_run_record(find(args.run), on_step=blocks.apply)) as live:
        report = run_report(live.state, run_facts(live))
        width = min(shutil.get_terminal_size((PAGE_CELLS, 24)).columns, PAGE_CELLS)
        return write_document(
            args,
            report,
            lines=lambda: report_lines(report, live.state, width),
            page=lambda: report_page(
                report, run_charts(live.series, live.hardware, blocks, live.metrics, loss_unit=report.loss_unit)
            ),
        )
