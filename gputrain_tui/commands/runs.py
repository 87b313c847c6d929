"""``gputrain runs``: lists running and ended runs from their directories."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from gputrain_tui import paths
from gputrain_tui.history.run_columns import (
    METRIC,
    NEWEST_FIRST,
    RUN_COLUMNS,
    Entry,
    best_cell,
    cause,
    loss_cell,
    metrics_text,
    run_filter,
    sorted_runs,
    with_metric,
)
from gputrain_tui.history.run_folders import RECENT_RUNS, UnreadableRun, newest_runs
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.history.summary import MAX_NAME_CHARS, UNREADABLE, summarize, summarize_unreadable
from gputrain_tui.lifecycle import launchers
from gputrain_tui.output import print_json, print_message, print_styled, without_nan
from gputrain_tui.tables import TableColumn, cut, duration, number, printable, table, width
from trainer.contract.errors import ExitCode, RequestError, nearest

TITLES = (
    *(
        "run",
        "state",
        "recipe",
        "ranks",
        "step",
        "loss",
        "valid",
        "best_valid",
        "lr",
        "tokens",
        "started",
        "took",
        "tags",
    ),
    *("cause", "metrics", "note"),
)
NUMBERS = ("ranks", "step", "loss", "valid", "lr", "tokens", "took")
CAUSE = TITLES.index("cause")
OPTIONAL = ("valid", "best_valid", "lr", "tokens", "tags", "cause", "metrics", "note")
"""Titles of columns that are omitted if no run has a value."""
OMITTED = (
    *(
        "lr",
        "tokens",
        "started",
        "ranks",
        "recipe",
        "metrics",
        "best_valid",
        "valid",
        "note",
        "tags",
        "took",
        "loss",
        "step",
    ),
    "cause",
)
"""Titles of columns in the order in which a narrow terminal omits them: a run's id has its recipe and start time."""
MAX_CAUSE_CELLS = 110
"""Width to which the cause is cut: `gputrain attach` and `--json` have it in full."""
MIN_CAUSE_CELLS = 16
"""Minimum width of the cause, below which another column is omitted."""
MAX_TAG_CELLS, MAX_NOTE_CELLS, MAX_METRICS_CELLS = 24, 40, 40
"""Widths to which tags, notes and metrics are cut: `--json` has them in full."""
PIPE_CELLS = 200
"""Width of a table without a terminal, to which these columns are cut in this order, each to a least width."""
SHORTENED = {"note": 12, "metrics": 12, "tags": 12, "cause": MIN_CAUSE_CELLS}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON array of objects")
    text = "only runs that match all words: part of a name, state:failed, loss<2, tags:baseline; columns: "
    text += ", ".join([*RUN_COLUMNS, "metric:NAME"])
    parser.add_argument("--filter", metavar="WORDS", default="", help=text)
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        help="sort by a column instead of newest first: text, losses (also a metric with loss in its name) and lr "
        "upwards, other numbers from the greatest; runs without a value come last",
    )
    parser.add_argument("--reverse", action="store_true", help="reverse the order")


def run(args: Namespace) -> int:
    """Print the runs."""
    try:
        wanted = run_filter(args.filter)
        sorted_runs([], args.sort or NEWEST_FIRST)
    except RequestError as error:
        raise with_metric(error, f"{args.sort or ''} {args.filter}", _entries()) from None
    counted = 0
    metrics: dict[str, None] = {}

    def kept() -> Iterator[Entry]:
        nonlocal counted
        for counted, entry in enumerate(_entries(), start=1):  # noqa: B007 - the count is read at the end
            metrics.update(dict.fromkeys(entry["metrics"] or ()))
            if wanted.keeps(entry):
                yield entry

    entries = kept()
    if args.sort or args.reverse:
        entries = iter(sorted_runs(list(entries), args.sort or NEWEST_FIRST, reverse=args.reverse))
        name = (args.sort or "").partition(METRIC)[2]
        if name and counted and name not in metrics:
            print_message(f"--sort {args.sort}: none of {counted} runs has the metric{nearest(name, metrics)}")
    if args.json:
        _print_json(entries)
    elif not _print_pages(entries):
        if counted:
            unknown = (name for name in wanted.named if name not in metrics)
            hints = "".join(f"; none has the metric {name!r}{nearest(name, metrics)}" for name in unknown)
            print(f"none of {counted} runs matches {wanted.text!r}{hints}", file=sys.stderr)
        else:
            print(f"no run in {paths.runs_folder()} yet; start one with `gputrain run RECIPE`", file=sys.stderr)
    return ExitCode.FINISHED


def _entries() -> Iterator[Entry]:
    """Yield the summaries of all runs, newest first, each read when it is asked for; unreadable ones last."""
    unreadable: list[Entry] = []
    now = time.time()
    for listed in newest_runs():
        if isinstance(listed, UnreadableRun):
            unreadable.append(summarize_unreadable(listed))
            continue
        yield summarize(listed if listed.state in ENDED else launchers.refresh(listed), now=now)
    yield from unreadable


def _print_json(entries: Iterable[Entry]) -> None:
    count = 0
    for count, entry in enumerate(entries, start=1):
        print_json(json.dumps(without_nan(entry), ensure_ascii=False), before="[" if count == 1 else ", ", end="")
    print("]" if count else "[]")


def _print_pages(entries: Iterator[Entry]) -> bool:
    """Print tables of ``RECENT_RUNS`` runs, so that the newest are shown before all are read; return whether any."""
    terminal = sys.stdout.isatty()
    cells = shutil.get_terminal_size().columns if terminal else None
    titles = ""
    while page := list(islice(entries, RECENT_RUNS)):
        text = report(page, colour=terminal and not os.environ.get("NO_COLOR"), cells=cells)
        first, _, rest = text.partition("\n")
        print_styled(rest if first == titles else text)
        titles = first
    return bool(titles)


def report(entries: Sequence[Entry], *, colour: bool = False, cells: int | None = None) -> str:
    """Return the runs as a table with local times; a dim line for each unreadable one.

    ``cells`` is the width of the terminal, to which the table is fitted. Lines of unreadable runs are never cut, as
    their problems are shown nowhere else.
    """
    dim, plain = ("\x1b[2m", "\x1b[0m") if colour else ("", "")
    rows = [
        [
            printable(entry["id"]),
            f"{entry['state']}{' ▲' * (entry['state'] == 'finished' and bool(entry['finding']))}",
            printable(entry["recipe"][:MAX_NAME_CHARS]),
            str(entry["world_size"]),
            number(entry["step"]),
            loss_cell(entry),
            number(entry["valid"], 4),
            printable(best_cell(entry)),
            "" if entry["lr"] is None else f"{entry['lr']:.3g}",
            "" if entry["tokens"] is None else f"{entry['tokens']:,}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["started"])),
            duration(entry["duration_s"]),
            cut(printable(" ".join(entry["tags"])), MAX_TAG_CELLS),
            printable(cause(entry)),
            cut(printable(metrics_text(entry)), MAX_METRICS_CELLS),
            cut(printable(entry["note"] or ""), MAX_NOTE_CELLS),
        ]
        for entry in entries
        if entry["state"] != UNREADABLE
    ]
    kept = [index for index, title in enumerate(TITLES) if title not in OPTIONAL or any(row[index] for row in rows)]
    kept, limits = _fitted(kept, rows, cells) if cells is not None else (kept, _limits_in_pipe(kept, rows))
    rows = [[cut(text, limits.get(index, width(text))) for index, text in enumerate(row)] for row in rows]
    columns = [TableColumn(TITLES[index], right=TITLES[index] in NUMBERS) for index in kept]
    lines = table(columns, [[row[index] for index in kept] for row in rows]).splitlines()
    wide = max((width(row[0]) for row in rows), default=0)
    for entry in entries:
        if entry["state"] == UNREADABLE:
            name = printable(entry["id"])
            text = f"{name}{' ' * max(wide - width(name), 0)}  {UNREADABLE}: {printable(entry['message'])}"
            lines.append(f"{dim}{text}{plain}")
    return "\n".join(lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width, (title, *(row[index] for row in rows)))) for index, title in enumerate(TITLES)]


def _limits_in_pipe(kept: Sequence[int], rows: Sequence[Sequence[str]]) -> dict[int, int]:
    """Return the widths to which columns are cut where all are shown, by index."""
    widths = _widths(rows)
    widths[CAUSE] = min(widths[CAUSE], MAX_CAUSE_CELLS)
    excess = sum(widths[index] + 2 for index in kept) - 2 - PIPE_CELLS
    for title, least in SHORTENED.items():
        index = TITLES.index(title)
        if index in kept:
            taken = max(0, min(excess, widths[index] - least))
            widths[index] -= taken
            excess -= taken
    return dict(enumerate(widths))


def _fitted(kept: Sequence[int], rows: Sequence[Sequence[str]], cells: int) -> tuple[list[int], dict[int, int]]:
    """Return the columns that fit into a width, and the remaining cells for the cause by its index."""
    widths = _widths(rows)
    shown = list(kept)
    for title in (None, *OMITTED):
        shown = [index for index in shown if TITLES[index] != title]
        cause_cells = cells - sum(widths[index] + 2 for index in shown if index != CAUSE)
        if cause_cells >= (min(MIN_CAUSE_CELLS, widths[CAUSE]) if CAUSE in shown else -2):
            break
    return shown, {CAUSE: cause_cells}
