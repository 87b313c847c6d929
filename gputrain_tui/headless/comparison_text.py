"""Renders a comparison of runs as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from gputrain_tui.headless.closing_report import MAX_LINES
from gputrain_tui.headless.number_text import number
from gputrain_tui.headless.progress import Piece, wrapped
from gputrain_tui.headless.report_text import table_lines
from gputrain_tui.history.comparison import DifferingValues
from gputrain_tui.history.run_columns import METRIC
from gputrain_tui.report.run_comparison import (
    LOSSES,
    FigureComparison,
    RunComparison,
    change_text,
    figure_title,
    limit_result,
)
from gputrain_tui.tables import TableColumn, cut_apart, size, width as cells_of

NOISE, BEST = "~", "*"


def comparison_lines(comparison: RunComparison, width: int) -> list[list[Piece]]:
    """Return the comparison in lines: of two runs each figure, of more a table of ``width`` cells with a row per run.

    Before it comes what differs in the recipes, after it the checked limits.
    """
    lines = _of_two(comparison) if len(comparison.runs) == 2 else _of_more(comparison, width)
    if comparison.limits:
        lines.append([])
    for limit in comparison.limits:
        style = "" if limit.exceeded is False else "alarm"
        run = "" if len(comparison.runs) == 2 else f"{limit.run}  "
        lines.append([(f"{limit_result(limit):<10}", style), (f"{run}{limit.condition}: {limit.text}", style)])
    return lines


def _of_two(comparison: RunComparison) -> list[list[Piece]]:
    first, run = comparison.runs
    rounds = f", means of {len(comparison.rounds)} rounds" if comparison.rounds else ""
    lines: list[list[Piece]] = [[(run, "bold"), (" against ", "dim"), (first, "bold"), (rounds, "")]]
    lines += _notes(comparison)
    if not comparison.recipe_unknown:
        lines += _changes(comparison.recipe) or [[("  the same recipe", "dim")]]
    lines += _changes(comparison.versions)
    return [*lines, [("  means over the steps after the first tenth", "dim")], [], *_figures(comparison)]


def _notes(comparison: RunComparison) -> list[list[Piece]]:
    """Return a line for each reason for which runs, their recipes or losses cannot be compared."""
    lines: list[list[Piece]] = [[("  not comparable  ", "alarm"), (text, "")] for text in comparison.incomparable]
    if comparison.recipe_unknown:
        lines.append([("  the recipes are not compared  ", "alarm"), (comparison.recipe_unknown, "")])
    for run, since in zip(comparison.runs, comparison.nan_since, strict=False):
        if since is not None:
            lines.append([("  no loss  ", "alarm"), (f"NaN or infinite since step {since:,} in {run}", "")])
    return lines


def _of_more(comparison: RunComparison, width: int) -> list[list[Piece]]:
    """Return a table with a row per run: its settings that differ, then as many figures as fit."""
    settings = [each for each in (*comparison.recipe, *comparison.versions) if each.key != "name"]
    columns = [("run", list(comparison.runs)), *_setting_columns(settings)]
    in_table = _cells(columns) <= width // 2 + _cells(columns[:1])
    if not in_table:  # a table of its own has a row per setting
        numbers = [str(number) for number in range(1, len(comparison.runs) + 1)]
        columns = [("", numbers), *columns[:1]]
    if len({*comparison.steps}) > 1:
        columns.append(("steps", [number(step, 0) for step in comparison.steps]))
    too_wide = []
    important = [figure for figure in comparison.figures if _importance(figure) < len(IMPORTANT)]
    for figure in sorted(important, key=_importance):
        column = (_title(figure), _marked(figure))
        if _cells([*columns, column]) <= width:
            columns.append(column)
        else:
            too_wide.append(figure.name.removeprefix(METRIC))
    rows = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
    titles = [TableColumn(title, right=title not in ("", "run")) for title, _ in columns]
    lines = [*_notes(comparison), *table_lines(titles, rows)]
    if not settings and not comparison.recipe_unknown:
        lines.append([("  the same recipe", "dim")])
    if not in_table:
        lines += [[], *_setting_lines(settings, width)]
    used = "".join(cell for row in rows for cell in row)
    marks = {BEST: "the best", NOISE: "noise: cannot be told apart from the first run"}
    notes = [f"{mark} {text}" for mark, text in marks.items() if mark in used]
    notes += [f"too wide for this terminal: {', '.join(too_wide)}"] if too_wide else []
    notes.append("means over the steps after the first tenth; each phase and interval: compare two runs, or --json")
    return [*lines, [], *([("  " + line, "dim")] for note in notes for line in wrapped(note, width - 2))]


Column = tuple[str, list[str]]
"""Title and cells."""
IMPORTANT = (*LOSSES, METRIC, "step_ms", "throughput", "peak_memory")
"""Figures in the table of several runs, by the first part of their names; the most important first."""


def _importance(figure: FigureComparison) -> int:
    name = METRIC if figure.name.startswith(METRIC) else figure.name.partition("@")[0]
    unlike = name in ("loss_by_samples", "loss_by_time")  # those of one batch size say no more than the loss
    return len(IMPORTANT) if unlike or name not in IMPORTANT else IMPORTANT.index(name)


def _cells(columns: Sequence[Column]) -> int:
    return 2 + sum(2 + max(map(cells_of, (title, *cells))) for title, cells in columns)


def _title(figure: FigureComparison) -> str:
    if figure.name.startswith(METRIC):
        return figure.name.removeprefix(METRIC)
    if figure.name.partition("@")[0] == "loss" and figure.step is not None:
        return f"loss near {figure.step:,}"
    names = {"step_ms": "step ms", "throughput": figure.unit, "peak_memory": "memory", "best_valid": "best valid"}
    return names.get(figure.name, figure.name)


def _marked(figure: FigureComparison) -> list[str]:
    """Return a figure of each run, with the marks of the best, and of those that may be equal to the first."""
    values = [figure.differences[0].before, *(each.now for each in figure.differences)]
    texts = [_value(figure, value) for value in values]
    known = [value for value in values if value is not None and isfinite(value)]
    best = None
    if figure.higher_is_better is not None and known:
        best = _value(figure, max(known) if figure.higher_is_better else min(known))
    is_noise = [False, *(each.is_noise and each.interval is not None for each in figure.differences)]
    marks = [
        (BEST if text == best and len({*texts}) > 1 else " ") + (NOISE if noise else " ")
        for text, noise in zip(texts, is_noise, strict=True)
    ]
    return [text + mark for text, mark in zip(texts, marks, strict=True)]


def _setting_columns(settings: Sequence[DifferingValues]) -> list[Column]:
    """Return a column per setting, under the last part of its key where no other one ends alike."""
    ends = [each.key.rpartition(".")[2] for each in settings]
    return [
        (end if ends.count(end) == 1 else each.key, [value or "–" for value in each.values])
        for end, each in zip(ends, settings, strict=True)
    ]


def _setting_lines(settings: Sequence[DifferingValues], width: int) -> list[list[Piece]]:
    """Return a table with a row per setting and a column per run."""
    count = len(settings[0].values)
    keys = max(cells_of(each.key) for each in settings)
    most = max((width - keys - 2) // count - 2, 1)
    rows = [[each.key, *(value or "–" for value in cut_apart(each.values, most))] for each in settings]
    return table_lines([TableColumn("setting"), *(TableColumn(str(run)) for run in range(1, count + 1))], rows)


def _changes(values: Sequence[DifferingValues]) -> list[list[Piece]]:
    lines: list[list[Piece]] = []
    for each in values[:MAX_LINES]:
        before, now = (value or "–" for value in cut_apart(each.values, 40))
        lines.append([("  ", ""), (each.key, "dim"), (f"  {before} → {now}", "")])
    if len(values) > MAX_LINES:
        lines.append([(f"  … and {len(values) - MAX_LINES:,} keys more", "dim")])
    return lines


def _figures(comparison: RunComparison) -> list[list[Piece]]:
    rows = []
    metrics = [figure for figure in comparison.figures if figure.name.startswith(METRIC)]
    left_out = metrics[MAX_LINES:]
    for figure in comparison.figures[: len(comparison.figures) - len(left_out)]:
        difference = figure.differences[0]
        shown = change_text(difference, relative=figure.relative)
        noise = "noise" if difference.is_noise else ""
        rows.append(
            (figure_title(figure), _value(figure, difference.before), _value(figure, difference.now), shown, noise)
        )
    right = ("before", "now")
    columns = [TableColumn(title, right=title in right) for title in ("figure", "before", "now", "change", "")]
    return table_lines(columns, rows, [f"… and {len(left_out):,} metrics more"] if left_out else [])


def _value(figure: FigureComparison, value: float | None) -> str:
    if value is None:
        return "–"
    return size(round(value)) if figure.unit == "bytes" else number(value, 2 if figure.relative else 4)
