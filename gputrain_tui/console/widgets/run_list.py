"""List of all runs, sorted and filtered, with marks for a comparison."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gputrain_tui import tables
from gputrain_tui.console.widgets.canvas import Canvas, Listing
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, crop, fit_row, format_short, pad, title_row
from gputrain_tui.console.widgets.run_header import mark_of
from gputrain_tui.history.comparison import MAX_RUNS, MIN_RUNS
from gputrain_tui.history.run_columns import NEWEST_FIRST, loss_cell, run_filter, sorted_runs
from gputrain_tui.history.summary import UNREADABLE
from gputrain_tui.row_filter import RowFilter
from gputrain_tui.tables import duration, evaluation, of_weights, printable

LEAST_NAME_CELLS = 30
"""Fewest cells of a run's id beside the columns of ``ADDED``."""
SHORT_NAME_CELLS = 21
"""Fewest cells of a run's id beside the columns of ``FIRST``: the date and the beginning of the name."""
SORT_KEYS = ("started", "state", "step", "loss", "valid", "lr", "tokens", "took", "recipe", "tags")
"""Columns that the sort key goes through."""


@dataclass(frozen=True)
class RunColumn:
    """One column of the list."""

    title: str
    width: int
    right: bool = True


RANKS, STEP, LOSS, TOOK = RunColumn("ranks", 5), RunColumn("step", 8), RunColumn("loss", 7), RunColumn("took", 9)
VALID, LR, TOKENS = RunColumn("valid", 7), RunColumn("lr", 8), RunColumn("tokens", 8)
STARTED, RECIPE = RunColumn("started", 16, right=False), RunColumn("recipe", 20, right=False)
TAGS = RunColumn("tags", 16, right=False)
ORDER = (RECIPE, RANKS, STEP, LOSS, VALID, LR, TOKENS, TOOK, STARTED, TAGS)
"""Columns from left to right."""
FIRST = (LOSS, STEP, TOOK, RANKS)
"""Columns of every list in which they fit, the most important first."""
ADDED = (VALID, STARTED, TAGS, LR, TOKENS, RECIPE)
"""Columns added to the first ones while they fit, the most important first."""
WITH_VALUES = {VALID: "valid", LR: "lr", TOKENS: "tokens", TAGS: "tags"}
"""Columns that are left out if no run has a value, with the value's key in the summary."""


def columns_for(width: int, entries: Sequence[Mapping[str, Any]]) -> list[RunColumn]:
    """Return the columns to the right of the run's id."""
    columns: set[RunColumn] = set()
    room = width - 18 - SHORT_NAME_CELLS
    for column in FIRST:
        if column.width + 2 <= room:
            columns.add(column)
            room -= column.width + 2
    room -= LEAST_NAME_CELLS - SHORT_NAME_CELLS
    for column in ADDED:
        name = WITH_VALUES.get(column)
        if name is not None and not any(entry[name] for entry in entries):
            continue
        if column.width + 2 > room:
            break
        columns.add(column)
        room -= column.width + 2
    return [column for column in ORDER if column in columns]


def cells_of(entry: Mapping[str, Any]) -> dict[RunColumn, str]:
    """Return the text of a run's cell in each column."""
    if entry["state"] == UNREADABLE:
        return dict.fromkeys(ORDER, EMPTY)
    step, valid, lr, tokens = (entry[name] for name in ("step", "valid", "lr", "tokens"))
    return {
        RANKS: f"{entry['world_size']:,}",
        STEP: EMPTY if step is None else f"{step:,}",
        LOSS: loss_cell(entry) or EMPTY,
        VALID: EMPTY if valid is None else tables.number(valid, 4),
        LR: EMPTY if lr is None else f"{lr:.3g}",
        TOKENS: EMPTY if tokens is None else format_short(tokens).strip(),
        TAGS: printable(" ".join(entry["tags"])) or EMPTY,
        TOOK: duration(entry["duration_s"]) or EMPTY,
        STARTED: time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["started"])),
        RECIPE: printable(entry["recipe"]),
    }


def draw_run(
    entry: Mapping[str, Any], width: int, columns: Sequence[RunColumn], *, number: int | None, opened: bool
) -> Row:
    """Return a run's line; ``number``: its index among the marked runs, None if it is not marked."""
    if entry["state"] == UNREADABLE:
        text = f"     {UNREADABLE:<11}{printable(entry['id'])}  {printable(entry['message'])}"
        return fit_row([(text, "dim")], width)
    mark, role = mark_of(entry["state"], marked=bool(entry["finding"]))
    cells = cells_of(entry)
    room = width - 18 - sum(column.width + 2 for column in columns)
    row: Row = [
        (" ", "base") if number is None else (str(number + 1), f"curve-{number}"),
        ("▸" if opened else " ", "accent"),
        (f" {mark} ", role),
        (f"{entry['state']:<10} ", role if role in ("error", "warning", "accent") else "dim"),
        (pad(printable(entry["id"]), room), "bright"),
    ]
    for column in columns:
        text = crop(cells[column], column.width)
        shown = "dim" if column in (STARTED, RECIPE, RANKS, LR, TOKENS) or text == EMPTY else "bright"
        row += [("  ", "base"), (text.rjust(column.width) if column.right else text.ljust(column.width), shown)]
    return fit_row(row, width)


class RunList(Listing):
    """List of the runs."""

    entries: Sequence[Mapping[str, Any]] | None = None
    """Runs that the filter keeps, in the chosen order; None before the first listing."""
    marked: tuple[str, ...] = ()
    """Ids of the marked runs, in the order of marking."""
    opened: str | None = None
    """Id of the run that the console follows."""

    listed: Sequence[Mapping[str, Any]] = ()
    """All runs that are read, newest first."""
    unread = 0
    """Older runs that are not read yet."""
    sort_key: str = NEWEST_FIRST
    """Column that the runs are sorted by."""
    reverse = False
    """Whether the order is reversed."""
    filter: RowFilter[Mapping[str, Any]] = run_filter("")

    def __init__(self, *, id: str) -> None:
        """Make an empty list."""
        super().__init__(id=id)
        self._columns: dict[int, list[RunColumn]] = {}
        self._going = 0

    def show(self, entries: Sequence[Mapping[str, Any]], *, unread: int = 0) -> None:
        """List runs, with the number of older ones that are not read yet; the cursor stays on its run."""
        self.listed = entries
        self.unread = unread
        self.update_entries()

    def update_entries(self) -> None:
        """Filter and sort the runs, and redraw."""
        before = self.entry
        kept = [entry for entry in self.listed if self.filter.keeps(entry)]
        if self.sort_key != NEWEST_FIRST or self.reverse:
            kept = sorted_runs(kept, self.sort_key, reverse=self.reverse)
        self.entries = kept
        self._columns.clear()
        self._going = sum(entry["state"] in ("queued", "starting", "running", "stopping") for entry in kept)
        ids = [entry["id"] for entry in kept]
        known = {entry["id"] for entry in self.listed}
        self.marked = tuple(run for run in self.marked if run in known)
        if before is not None and before["id"] in ids and self.cursor:
            self.cursor = ids.index(before["id"])
        self.redraw()

    @property
    def entry(self) -> Mapping[str, Any] | None:
        """The run under the cursor."""
        if not self.entries:
            return None
        return self.entries[min(self.cursor, len(self.entries) - 1)]

    def mark(self) -> bool:
        """Mark or unmark the run under the cursor; return False if ``MAX_RUNS`` are marked already."""
        entry = self.entry
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

    def count(self) -> int:
        """Return the number of runs."""
        return len(self.entries or ())

    def head(self, width: int) -> list[Row]:
        """Return the title and the names of the columns."""
        entries = self.entries or ()
        left: Row = [("runs", "title")]
        if entries:
            left.append((f"  {len(entries):,}", "dim"))
        if self._going:
            left.append((f"  {self._going} running", "accent"))
        if self.unread:
            left.append((f"  reading {self.unread:,} older", "dim"))
        remarks: list[Row] = []
        if len(self.marked) >= MIN_RUNS:
            remarks.append([(f"{len(self.marked)} marked", "accent"), (", c compares them", "dim")])
        elif self.marked:
            remarks.append([("1 marked", "accent"), (", mark another to compare", "dim")])
        elif len(entries) >= MIN_RUNS:
            remarks.append([("space marks runs to compare", "dim")])
        if self.sort_key != NEWEST_FIRST or self.reverse:
            remarks.insert(0, [(f"by {self.sort_key}{', reversed' if self.reverse else ''}", "dim")])
        if self.filter.text:
            remarks.insert(0, [(f"{len(entries):,} of {len(self.listed):,}  ", "dim"), (self.filter.text, "accent")])
        title = title_row(width, left, remarks)
        if not entries:
            return [title]
        columns = self._columns_for(width)
        room = width - 18 - sum(column.width + 2 for column in columns)
        names = f"     {'state':<11}{'run'.ljust(room)}" + "".join(
            "  " + (column.title.rjust(column.width) if column.right else column.title.ljust(column.width))
            for column in columns
        )
        return [title, fit_row([(names, "dim")], width)]

    def row(self, index: int, width: int) -> Row:
        """Return the line of a run."""
        assert self.entries is not None
        entry = self.entries[index]
        number = self.marked.index(entry["id"]) if entry["id"] in self.marked else None
        return draw_run(entry, width, self._columns_for(width), number=number, opened=entry["id"] == self.opened)

    def _columns_for(self, width: int) -> list[RunColumn]:
        """Return the columns of a width; which have values is looked up once for each list, not for each line."""
        if width not in self._columns:
            self._columns[width] = columns_for(width, self.entries or ())
        return self._columns[width]

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the text of an empty list."""
        if self.entries is None:
            return centred_text(width, height, ["looking for runs"])
        if self.listed:
            return centred_text(
                width,
                height,
                [
                    f"None of {len(self.listed):,} runs matches {self.filter.text}",
                    "",
                    "/ changes the filter, esc removes it.",
                ],
            )
        lines = ["No run yet.", "", "d runs the demo: half a minute on this machine's CPU.", "2 opens a recipe."]
        return centred_text(width, height, lines)


class RunCard(Canvas):
    """Panel with details of the run under the cursor."""

    entry: Mapping[str, Any] | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the details, as many lines as fit."""
        entry = self.entry
        if entry is None:
            return []
        cells = cells_of(entry)
        mark, role = mark_of(entry["state"], marked=bool(entry["finding"]))
        message = entry["message"] or ""
        rows: list[Row] = [
            title_row(width, [(printable(entry["id"]), "title"), (f"  {mark} {entry['state']}", role)]),
            [
                ("started  ", "dim"),
                (cells[STARTED], "bright"),
                ("   recipe  ", "dim"),
                (cells[RECIPE], "bright"),
            ],
            [("folder   ", "dim"), (printable(entry["run_dir"]), "dim")],
        ]
        if (tested := entry.get("tested")) is not None:
            shown = evaluation(of_weights(tested["weights_step"]), tested["loss"], tested["metrics"])
            rows.insert(1, [(f"{tested['split']:<9}", "dim"), (printable(shown), "bright")])
        if entry["note"] or entry["tags"]:
            tags = [(f"[{printable(tag)}] ", "accent") for tag in entry["tags"] or ()]
            rows.insert(1, [("note     ", "dim"), *tags, (printable(entry["note"] or ""), "bright")])
        if entry["finding"]:
            rows.insert(1, [(f"{entry['state']}, with {printable(entry['finding'])}", "warning")])
        if message:
            rows.insert(1, [(printable(message), "error" if entry["state"] == "failed" else "bright")])
        return [fit_row(row, width) for row in rows[:height]]
