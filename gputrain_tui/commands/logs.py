"""``gputrain logs``: prints the output of a run's ranks."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from gputrain_tui.commands.shared_flags import RUN_HELP, add_ranks, chosen_ranks
from gputrain_tui.history.follow import AppendedFile, Follower, by_rank
from gputrain_tui.history.run_folders import Run, find
from gputrain_tui.history.status_file import is_over
from gputrain_tui.lifecycle import launchers
from gputrain_tui.output import print_message
from gputrain_tui.tables import ESCAPES, printable
from trainer.contract.errors import ExitCode, RecordError
from trainer.contract.record.regular_file import open_regular

CHUNK_BYTES = 1 << 20
"""Bytes that are read and printed at a time, to bound memory."""
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line in memory; a longer one is printed in pieces."""
PREFIX_COLOURS = (36, 33, 32, 35, 34, 31)
"""SGR colours of rank prefixes, from the terminal's palette."""

Print = Callable[[str, bytes], None]
"""Function that prints whole lines of a file, given by its name without suffix."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_ranks(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="keep printing until the run has ended")


def run(args: Namespace) -> int:
    """Print the logs."""
    chosen = launchers.refresh(find(args.run))
    ranks = chosen_ranks(args, chosen, command="logs")
    only = {str(rank) for rank in ranks} or None
    out = sys.stdout.buffer
    on_terminal = out.isatty()
    several = len(ranks) > 1 or (not ranks and chosen.status.recorded_ranks > 1)
    colour = on_terminal and not os.environ.get("NO_COLOR")

    def show(name: str, lines: bytes) -> None:
        label = line_prefix(name, colour=colour) if several or not name.isdecimal() else b""
        out.write(b"".join(format_line(line, label, on_terminal) for line in lines.removesuffix(b"\n").split(b"\n")))
        out.flush()

    printed = (follow_logs if args.follow else print_logs)(chosen, only, show)
    if not printed:
        whose = "rank " + " or ".join(map(str, ranks)) if ranks else "any rank"
        known = "" if chosen.status.archived is None else ", or its archive was made without --logs"
        print(f"nothing was printed by {whose} of {chosen.id}{known}", file=sys.stderr)
    return ExitCode.FINISHED


def print_logs(run: Run, only: set[str] | None, show: Print) -> bool:
    """Print the existing output, file after file; return whether there was any."""
    printed = False
    try:
        names = sorted((entry.name for entry in run.dir.logs.iterdir() if entry.suffix == ".log"), key=by_rank)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RecordError(f"{run.dir.logs} cannot be read: {error.strerror}") from None
    for name in names:
        stem = Path(name).stem
        if only is not None and stem not in only:
            continue
        try:
            os.close(open_regular(run.dir.logs / name))
        except OSError as error:
            print_message(f"{run.dir.logs / name} cannot be read: {error.strerror}")
            continue
        file = AppendedFile(run.dir.logs / name, max_line_bytes=MAX_LINE_BYTES)
        left = file.unread()
        printed = printed or left > 0
        while left > 0:
            lines = file.lines(min(left, CHUNK_BYTES))
            left -= min(left, CHUNK_BYTES)
            if lines:
                show(stem, lines)
        rest = file.remainder()
        if rest:
            show(stem, rest)
        file.close()
    return printed


def follow_logs(
    run: Run,
    only: set[str] | None,
    show: Print,
    *,
    interval_s: float = 0.1,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Print existing and new output until the run has ended; return whether there was any."""
    follower = Follower(run.dir.logs, ".log", only=only, max_line_bytes=MAX_LINE_BYTES)
    printed = False
    try:
        while True:
            over = is_over(run.dir)  # checked before reading, so that all lines before the end are read
            for name, lines in follower.poll(CHUNK_BYTES):
                show(name, lines)
                printed = True
            if follower.backlog_bytes:
                continue
            if over:
                for name, rest in follower.remainders():
                    show(name, rest)
                    printed = True
                return printed
            sleep(interval_s)
    finally:
        follower.close()


def line_prefix(name: str, *, colour: bool) -> bytes:
    """Return the prefix of a file's lines: ``[rank 3] `` or ``[node 0] ``."""
    text = f"[rank {name}]" if name.isdecimal() else printable(f"[{name.replace('-', ' ')}]")
    if colour:
        shade = PREFIX_COLOURS[int(name[-9:]) % len(PREFIX_COLOURS)] if name.isdecimal() else 2
        text = f"\x1b[{shade}m{text}\x1b[0m"
    return text.encode("utf-8", "backslashreplace") + b" "


def format_line(line: bytes, label: bytes, on_terminal: bool) -> bytes:
    """Return a line to print: unchanged for a file or pipe, without control characters for a terminal.

    For a terminal, escape sequences are dropped and other control characters and invalid UTF-8 made visible; of a line
    that was overwritten in place (a progress bar) only the last version is printed.
    """
    if on_terminal:
        text = ESCAPES.sub("", line.decode("utf-8", "backslashreplace"))
        versions = [version for version in text.split("\r") if version]
        line = printable(versions[-1] if versions else "").encode()
    return label + line + b"\n"
