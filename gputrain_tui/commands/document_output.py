"""Flags of a command that tells of runs as text, JSON or a page, and the writing of what it tells."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gputrain_tui.headless.foreground import use_colour
from gputrain_tui.headless.progress import Piece, paint
from gputrain_tui.output import print_json, print_message, print_styled
from gputrain_tui.report.field_docs import described_schema
from trainer.contract.errors import ExitCode
from trainer.contract.output_file import OutputError, output_file, require_place


def add_form(parser: ArgumentParser) -> None:
    """Declare ``--json``, ``--html``, ``--schema``, ``-o`` and ``--force``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--html", action="store_true", help="print one HTML page with charts, that opens from disk")
    form.add_argument("--schema", action="store_true", help="print the JSON Schema of --json")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to a file instead of standard output")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def require_output(args: Namespace) -> None:
    """Check the file of ``-o`` before long work.

    Raises:
        RequestError: it exists, or cannot be written.
    """
    if args.output is not None:
        require_place(args.output, force=args.force)


def write_schema(args: Namespace, kind: type[msgspec.Struct]) -> int:
    """Write the JSON Schema of what ``--json`` prints; return the exit code."""
    return _write(args, msgspec.json.encode(described_schema(kind)).decode())


def write_document(
    args: Namespace, data: Any, *, lines: Callable[[], Sequence[Sequence[Piece]]], page: Callable[[], str]
) -> int:
    """Write data in the form that was asked for, to the file or standard output; return the exit code."""
    if args.json:
        return _write(args, msgspec.json.encode(data).decode())
    if args.html:
        return _write(args, page())
    colour = args.output is None and use_colour(sys.stdout.isatty(), os.environ)
    return _write(args, "\n".join(paint(line, colour=colour) for line in lines()))


def _write(args: Namespace, text: str) -> int:
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
