"""List of all runs, sorted and filtered, with marks for a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import nan

from gputrain_tui import tables
from gputrain_tui.console.widgets.canvas import Canvas, Heading, Listing
from gputrain_tui.console.widgets.drawing import (
    EMPTY,
    Row,
    centred_text,
    crop,
    fit_row,
    format_short,
    pad,
    title_row,
    wrap_text,
)
from gputrain_tui.console.widgets.run_header import sign_of
from gputrain_tui.console.widgets.table_columns import Column, fitting, number_column, text_column
from gputrain_tui.history.comparison import MAX_RUNS, MIN_RUNS
from gputrain_tui.history.run_columns import (
    BEST,
    METRIC,
    NEWEST_FIRST,
    RUN_COLUMNS,
    Entry,
    best_cell,
    message_text,
    metric_names,
    metrics_text,
    run_filter,
    sorted_runs,
)
from gputrain_tui.history.summary import UNREADABLE
from gputrain_tui.row_filter import RowFilter, Value
from gputrain_tui.tables import duration, evaluation, of_weights, printable

SORT_KEYS = ("started", "state", "step", "loss", "valid", BEST, "lr", "tokens", "took", "recipe", "tags")


def _loss(value: float, width: int) -> str:
    return tables.number(value, 4)


def _count(value: int, width: int) -> str:
    text = f"{value:,}"
    return text if len(text) <= width else format_short(value, width)


def _date(seconds: float, width: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _value(key: str) -> Callable[[Entry], Value]:
    return RUN_COLUMNS[key].value


COLUMNS: tuple[Column[Entry], ...] = (
    text_column("recipe", 20, 9, _value("recipe"), role="dim"),
    number_column("ranks", 5, 3, _value("ranks"), form=_count, role="dim"),
    number_column("step", 8, 1, _value("step"), form=_count),
    number_column("loss", 7, 0, lambda entry: nan if entry["loss_is_nan"] else entry["loss"], form=_loss),
    number_column("valid", 7, 4, _value("valid"), form=_loss),
    text_column(BEST, 24, 6, best_cell, form=lambda value, width: crop(printable(value), width)),
    number_column("lr", 8, 7, _value("lr"), form=lambda value, width: f"{value:.3g}", role="dim"),
    number_column("tokens", 8, 8, _value("tokens"), form=_count, role="dim"),
    number_column("took", 9, 2, _value("took"), form=lambda value, width: duration(value)),
    text_column("started", 16, 5, _value("started"), form=_date, role="dim"),
    text_column("tags", 16, 6, _value("tags")),
    text_column("metrics", 24, 9, lambda entry: metrics_text(entry) or None),
)
"""From left to right."""
SPARSE = ("valid", BEST, "lr", "tokens", "tags", "metrics")
"""Columns that are left out if no run has a value."""
BEFORE_CELLS = 17
"""Cells of a line besides the run's id and the columns."""


def columns_for(width: int, entries: Sequence[Entry]) -> list[Column[Entry]]:
    """Return the columns to the right of the run's id."""
    usable = [column for column in COLUMNS if column.key not in SPARSE or any(map(column.value, entries))]
    first = [column for column in usable if column.order < 4]
    # An id has at least 21 cells beside the first columns, its date and the beginning of its name; else 30.
    choices = fitting(first, width - BEFORE_CELLS - 21), fitting(usable, width - BEFORE_CELLS - 30)
    return max(choices, key=len)


def cell_text(entry: Entry, key: str) -> str:
    """Return the whole text of a run in a column."""
    column = next(column for column in COLUMNS if column.key == key)
    value = None if entry["state"] == UNREADABLE else column.value(entry)
    return EMPTY if value is None else column.form(value, column.width)


def draw_run(entry: Entry, width: int, columns: Sequence[Column[Entry]], *, number: int | None) -> Row:
    """Return a run's line; ``number``: its index among the marked runs, None if it is not marked."""
    if entry["state"] == UNREADABLE:
        text = f"    {UNREADABLE:<11}{printable(entry['id'])}  {printable(entry['message'])}"
        return fit_row([(text, "dim")], width)
    sign, role = sign_of(entry["state"], flagged=bool(entry["finding"]))
    row: Row = [
        (" ", "base") if number is None else (str(number + 1), f"curve-{number}"),
        (f" {sign} ", role),
        (f"{entry['state']:<10} ", role if role in ("error", "warning", "accent") else "dim"),
        (pad(printable(entry["id"]), _id_cells(width, columns)), "bright"),
    ]
    for column in columns:
        text = column.text(entry)
        row += [("  ", "base"), (text, "dim" if text.strip() == EMPTY else column.role_of(entry))]
    return fit_row(row, width)


def _id_cells(width: int, columns: Sequence[Column[Entry]]) -> int:
    return width - BEFORE_CELLS - sum(column.width + 2 for column in columns)


class RunList(Listing[Entry]):
    """List of the runs that the filter keeps, in the chosen order."""

    marked: tuple[str, ...] = ()
    """Ids of the marked runs, in the order of marking."""
    listed: Sequence[Entry] | None = None
    """All runs that are read, newest first; None before the first listing."""
    unread = 0
    sort_key: str = NEWEST_FIRST
    reverse = False
    filter: RowFilter[Entry] = run_filter("")

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._columns: dict[int, list[Column[Entry]]] = {}
        self._going = 0

    def key(self, line: Entry) -> object:
        return line["id"]

    def show(self, entries: Sequence[Entry], *, unread: int = 0) -> None:
        """List runs, with the number of older ones that are not read yet; the cursor stays on its run."""
        self.listed = entries
        self.unread = unread
        self._update_entries()

    def update_entries(self) -> None:
        """Filter and sort the runs anew, and redraw; a cursor on the first run stays there."""
        if not self.cursor:
            self.lines = ()
        self._update_entries()

    def _update_entries(self) -> None:
        listed = self.listed or ()
        kept = [entry for entry in listed if self.filter.keeps(entry)]
        if self.sort_key != NEWEST_FIRST or self.reverse:
            kept = sorted_runs(kept, self.sort_key, reverse=self.reverse)
        self._columns.clear()
        self._going = sum(entry["state"] in ("queued", "starting", "running", "stopping") for entry in kept)
        known = {entry["id"] for entry in listed}
        self.marked = tuple(run for run in self.marked if run in known)
        self.show_lines(kept)

    @property
    def sort_keys(self) -> list[str]:
        """Columns to sort by, the users' own metrics last."""
        return [*SORT_KEYS, *(METRIC + name for name in metric_names(self.listed or ()))]

    @property
    def entry(self) -> Entry | None:
        return self.current

    def mark(self) -> bool:
        """Mark or unmark the run under the cursor; return False if ``MAX_RUNS`` are marked already."""
        entry = self.current
        if entry is None:
            return True
        if entry["id"] in self.marked:
            self.marked = tuple(run for run in self.marked if run != entry["id"])
        elif len(self.marked) >= MAX_RUNS:
            return False
        else:
            self.marked += (entry["id"],)
        self.redraw()
        return True

    def head(self, width: int) -> list[Row]:
        entries = self.lines
        left: Row = [("runs", "title")]
        if entries:
            left.append((f"  {len(entries):,}", "dim"))
        if self._going:
            left.append((f"  {self._going} running", "accent"))
        if self.unread:
            left.append((f"  reading {self.unread:,} older", "dim"))
        rights: list[Row] = []
        if self.filter.text:
            count = f"{len(entries):,} of {len(self.listed or ()):,}  "
            rights.append([(count, "dim"), (self.filter.text, "accent")])
        if self.sort_key != NEWEST_FIRST or self.reverse:
            rights.append([(f"by {self.sort_key}{', reversed' if self.reverse else ''}", "dim")])
        if len(self.marked) >= MIN_RUNS:
            rights.append([(f"{len(self.marked)} marked", "accent"), (", c compares them", "dim")])
        elif self.marked:
            rights.append([("1 marked", "accent"), (", mark another to compare", "dim")])
        elif len(entries) >= MIN_RUNS:
            rights.append([("space marks runs to compare", "dim")])
        title = title_row(width, left, rights)
        if not entries:
            return [title]
        columns = self._columns_for(width)
        titles = "".join(f"  {column.aligned_title}" for column in columns)
        return [title, [(f"    {'state':<11}{'run':<{max(_id_cells(width, columns), 0)}}{titles}", "dim")]]

    def row(self, line: Entry, width: int) -> Row:
        number = self.marked.index(line["id"]) if line["id"] in self.marked else None
        return draw_run(line, width, self._columns_for(width), number=number)

    def _columns_for(self, width: int) -> list[Column[Entry]]:
        """Return the columns of a width; which have values is looked up once for each list, not for each line."""
        if width not in self._columns:
            self._columns[width] = columns_for(width, [line for line in self.lines if not isinstance(line, Heading)])
        return self._columns[width]

    def empty(self, width: int, height: int) -> list[Row]:
        if self.listed is None:
            lines = ["looking for runs"]
        elif self.listed:
            lines = [crop(f"No run matches {self.filter.text!r}.", width), "", "esc clears the filter, / changes it."]
        else:
            lines = ["No run yet.", "", "d trains the demo: two processes on this CPU, half a minute, no download.",
                     "2 opens a recipe, or writes one for your script, a task or a torchrun command.",
                     "1 shows the machines and their GPUs, ? every key."]  # fmt: skip
        return centred_text(width, height, lines)


class RunCard(Canvas):
    """Panel with details of the run under the cursor."""

    entry: Entry | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        rows = self.details(width)
        if len(rows) > height:
            rows = [*rows[: height - 1], [("… ⏎ opens the run", "dim")]]
        return [fit_row(row, width) for row in rows[:height]]

    def details(self, width: int) -> list[Row]:
        """Return all details, the most important first, but the note before a long message; that is wrapped."""
        entry = self.entry
        if entry is None:
            return []
        sign, role = sign_of(entry["state"], flagged=bool(entry["finding"]))
        rows: list[Row] = [title_row(width, [(printable(entry["id"]), "title"), (f"  {sign} {entry['state']}", role)])]
        if entry["note"] or entry["tags"]:
            tags = [(f"[{printable(tag)}] ", "accent") for tag in entry["tags"] or ()]
            rows.append([("note     ", "dim"), *tags, (printable(entry["note"] or ""), "bright")])
        if entry["message"]:
            role = "error" if entry["state"] == "failed" else "bright"
            rows += [[(line, role)] for line in wrap_text(printable(message_text(entry)), width)]
        if entry["finding"]:
            finding = f"{entry['state']}, with {printable(entry['finding'])}"
            rows += [[(line, "warning")] for line in wrap_text(finding, width)]
        if (tested := entry.get("tested")) is not None:
            shown = evaluation(of_weights(tested["weights_step"]), tested["loss"], tested["metrics"])
            rows.append([(f"{tested['split']:<9}", "dim"), (printable(shown), "bright")])
        if best := best_cell(entry):
            rows.append([("best     ", "dim"), (printable(best), "bright"), ("   newest  ", "dim"),
                         (cell_text(entry, "valid"), "bright")])  # fmt: skip
        started, recipe = cell_text(entry, "started"), cell_text(entry, "recipe")
        rows.append([("started  ", "dim"), (started, "bright"), ("   recipe  ", "dim"), (recipe, "bright")])
        rows.append([("folder   ", "dim"), (printable(entry["run_dir"]), "dim")])
        return rows
