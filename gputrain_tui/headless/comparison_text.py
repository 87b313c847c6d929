"""Renders a comparison of runs as text."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.headless.closing_report import MAX_LINES
from gputrain_tui.headless.number_text import number
from gputrain_tui.headless.progress import Piece
from gputrain_tui.headless.report_text import table_lines
from gputrain_tui.history.comparison import DifferingValues
from gputrain_tui.history.run_columns import METRIC
from gputrain_tui.report.run_comparison import (
    FigureComparison,
    RunComparison,
    change_text,
    figure_title,
    limit_result,
)
from gputrain_tui.tables import TableColumn, cut, size


def comparison_lines(comparison: RunComparison) -> list[list[Piece]]:
    """Return the comparison in lines: what differs in the recipes, then each figure, then the checked limits."""
    lines: list[list[Piece]] = []
    first = comparison.runs[0]
    for index, run in enumerate(comparison.runs[1:]):
        rounds = f", means of {len(comparison.rounds)} rounds" if comparison.rounds else ""
        lines += [[(run, "bold"), (" against ", "dim"), (first, "bold"), (rounds, "")]]
        lines += [[("  not comparable  ", "alarm"), (text, "")] for text in comparison.incomparable]
        changed = _changes(comparison.recipe, index)
        if comparison.recipe_unknown:
            changed = [[("  the recipes are not compared  ", "alarm"), (comparison.recipe_unknown, "")]]
        lines += changed or [[("  the same recipe", "dim")]]
        lines += _changes(comparison.versions, index)
        lines += _nan_lines(comparison, index)
        lines += [[("  means over the steps after the first tenth", "dim")], [], *_figures(comparison, index), []]
    for limit in comparison.limits:
        style = "" if limit.exceeded is False else "alarm"
        lines.append([(f"{limit_result(limit):<10}", style), (f"{limit.condition}: {limit.text}", style)])
    return lines if comparison.limits else lines[:-1]


def _nan_lines(comparison: RunComparison, index: int) -> list[list[Piece]]:
    """Return a line for each of both runs whose loss is NaN or infinite."""
    both = [(comparison.runs[at], comparison.nan_since[at]) for at in (0, index + 1) if comparison.nan_since]
    return [[("  no loss  ", "alarm"), (f"NaN or infinite since step {at:,} in {run}", "")] for run, at in both if at]


def _changes(values: Sequence[DifferingValues], index: int) -> list[list[Piece]]:
    changed = [each for each in values if each.values[index + 1] != each.values[0]]
    lines: list[list[Piece]] = []
    for each in changed[:MAX_LINES]:
        before, now = (cut(value, 40) or "–" for value in (each.values[0], each.values[index + 1]))
        lines.append([("  ", ""), (each.key, "dim"), (f"  {before} → {now}", "")])
    if len(changed) > MAX_LINES:
        lines.append([(f"  … and {len(changed) - MAX_LINES:,} keys more", "dim")])
    return lines


def _figures(comparison: RunComparison, index: int) -> list[list[Piece]]:
    rows = []
    metrics = [figure for figure in comparison.figures if figure.name.startswith(METRIC)]
    left_out = metrics[MAX_LINES:]
    for figure in comparison.figures[: len(comparison.figures) - len(left_out)]:
        difference = figure.differences[index]
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
