"""List of all runs, newest first, with marks for a comparison."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gputrain_tui import tables
from gputrain_tui.console.widgets.canvas import Canvas, Listing
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, crop, fit_row, pad, title_row
from gputrain_tui.console.widgets.run_header import MARKS
from gputrain_tui.history.compare import MAX_RUNS, MIN_RUNS
from gputrain_tui.history.summary import UNREADABLE
from gputrain_tui.tables import duration, evaluation, of_weights, printable

STARTED_FROM_CELLS, RECIPE_FROM_CELLS = 100, 150
"""Fewest cells for the columns of the start time, and of the recipe."""


@dataclass(frozen=True)
class RunColumn:
    """One column of the list."""

    title: str
    wide: int
    right: bool = True


RANKS, STEP, LOSS, TOOK = RunColumn("ranks", 5), RunColumn("step", 8), RunColumn("loss", 7), RunColumn("took", 9)
STARTED, RECIPE = RunColumn("started", 16, right=False), RunColumn("recipe", 20, right=False)


def columns_for(width: int) -> list[RunColumn]:
    """Return the columns at the right of the run's id."""
    columns = [RANKS, STEP, LOSS, TOOK]
    if width < STARTED_FROM_CELLS:
        return columns
    return [RECIPE, *columns, STARTED] if width >= RECIPE_FROM_CELLS else [*columns, STARTED]


def cells_of(entry: Mapping[str, Any]) -> dict[RunColumn, str]:
    """Return the texts of a run's line."""
    if entry["state"] == UNREADABLE:
        return dict.fromkeys((RANKS, STEP, LOSS, TOOK, STARTED, RECIPE), EMPTY)
    step, loss = entry["step"], entry["loss"]
    return {
        RANKS: f"{entry['world_size']:,}",
        STEP: EMPTY if step is None else f"{step:,}",
        LOSS: EMPTY if loss is None else tables.number(loss, 4),
        TOOK: duration(entry["duration_s"]) or EMPTY,
        STARTED: time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["started"])),
        RECIPE: printable(entry["recipe"]),
    }


def draw_run(entry: Mapping[str, Any], width: int, *, number: int | None, opened: bool) -> Row:
    """Return a run's line; ``number``: its place among the marked runs, from 0."""
    if entry["state"] == UNREADABLE:
        text = f"     {UNREADABLE:<11}{printable(entry['id'])}  {printable(entry['message'])}"
        return fit_row([(text, "dim")], width)
    mark, role = MARKS.get(entry["state"], ("?", "warning"))
    columns = columns_for(width)
    cells = cells_of(entry)
    room = width - 18 - sum(column.wide + 2 for column in columns)
    row: Row = [
        (" ", "base") if number is None else (str(number + 1), f"curve-{number}"),
        ("▸" if opened else " ", "accent"),
        (f" {mark} ", role),
        (f"{entry['state']:<10} ", role if role in ("error", "warning", "accent") else "dim"),
        (pad(printable(entry["id"]), room), "bright"),
    ]
    for column in columns:
        text = crop(cells[column], column.wide)
        shown = "dim" if column in (STARTED, RECIPE, RANKS) or text == EMPTY else "bright"
        row += [("  ", "base"), (text.rjust(column.wide) if column.right else text.ljust(column.wide), shown)]
    return fit_row(row, width)


class RunList(Listing):
    """The runs."""

    entries: Sequence[Mapping[str, Any]] | None = None
    """None until they were listed."""
    marked: tuple[str, ...] = ()
    """Ids in the order in which they were marked."""
    opened: str | None = None
    """Id of the run that the console watches."""

    def show(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Show runs; the cursor stays on its run."""
        before = self.entry
        self.entries = entries
        ids = [entry["id"] for entry in entries]
        self.marked = tuple(run for run in self.marked if run in ids)
        if before is not None and before["id"] in ids and self.cursor:
            self.cursor = ids.index(before["id"])
        self.redraw()

    @property
    def entry(self) -> Mapping[str, Any] | None:
        """The run with the cursor."""
        if not self.entries:
            return None
        return self.entries[min(self.cursor, len(self.entries) - 1)]

    def mark(self) -> bool:
        """Mark the run with the cursor, or not; return False when no more can be marked."""
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
        going = sum(entry["state"] in ("queued", "starting", "running", "stopping") for entry in entries)
        left: Row = [("runs", "title")]
        if entries:
            left.append((f"  {len(entries):,}", "dim"))
        if going:
            left.append((f"  {going} running", "accent"))
        remarks: list[Row] = []
        if len(self.marked) >= MIN_RUNS:
            remarks.append([(f"{len(self.marked)} marked", "accent"), (", c compares them", "dim")])
        elif self.marked:
            remarks.append([("1 marked", "accent"), (", mark another to compare", "dim")])
        elif len(entries) >= MIN_RUNS:
            remarks.append([("space marks runs to compare", "dim")])
        title = title_row(width, left, remarks)
        if not entries:
            return [title]
        columns = columns_for(width)
        room = width - 18 - sum(column.wide + 2 for column in columns)
        names = f"     {'state':<11}{'run'.ljust(room)}" + "".join(
            "  " + (column.title.rjust(column.wide) if column.right else column.title.ljust(column.wide))
            for column in columns
        )
        return [title, fit_row([(names, "dim")], width)]

    def row(self, index: int, width: int) -> Row:
        """Return the line of a run."""
        assert self.entries is not None
        entry = self.entries[index]
        number = self.marked.index(entry["id"]) if entry["id"] in self.marked else None
        return draw_run(entry, width, number=number, opened=entry["id"] == self.opened)

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the text of an empty list."""
        if self.entries is None:
            return centred_text(width, height, ["looking for runs"])
        lines = ["No run yet.", "", "d runs the demo: half a minute on this machine's CPU.", "2 opens a recipe."]
        return centred_text(width, height, lines)


class RunCard(Canvas):
    """Details of the run with the cursor."""

    entry: Mapping[str, Any] | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the run in a few lines."""
        entry = self.entry
        if entry is None:
            return []
        cells = cells_of(entry)
        mark, role = MARKS.get(entry["state"], ("?", "warning"))
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
        if message:
            rows.insert(1, [(printable(message), "error" if entry["state"] == "failed" else "bright")])
        return [fit_row(row, width) for row in rows[:height]]
