"""History screen: open, resume, relaunch, delete and compare runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Input

from gputrain_tui import paths
from gputrain_tui.console.screens.console_screen import Page, next_of
from gputrain_tui.console.screens.start_and_stop import confirm_resume, confirm_stop, relaunch
from gputrain_tui.console.widgets.line_input import PromptLine
from gputrain_tui.console.widgets.overlay_chart import OverlayChart
from gputrain_tui.console.widgets.run_list import RunCard, RunList
from gputrain_tui.history.comparison import MAX_RUNS, MIN_RUNS
from gputrain_tui.history.notes import checked_note, checked_tags, read_notes, write_notes
from gputrain_tui.history.run_columns import run_filter, with_metric
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.run_listing import ListedRuns, RunListing
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle.delete import delete_run
from trainer.contract.errors import RequestError


class HistoryScreen(Page):
    """The history screen."""

    PLACE = "history"
    CSS_PATH = "history.tcss"
    AUTO_FOCUS = "#runs"

    def __init__(self, *, now: Callable[[], float] = time.time, clocked: bool = True) -> None:
        """Make the screen; ``clocked``: whether it lists on a timer."""
        super().__init__()
        self._now = now
        self._clocked = clocked
        self._listing = RunListing()
        self._table = RunList(id="runs")
        self._is_listing = False
        self._list_again = False
        """Whether something has changed since the listing under way began."""
        self._quiet_until = 0.0
        """Monotonic seconds before which the timer does not list again."""
        self._prompt_for: Literal["filter", "note", "tags"] | None = None
        """Purpose of the open input line; None: it is closed."""
        self._edited_run: Run | None = None

    def body(self) -> ComposeResult:
        with Vertical(id="all-runs"):
            yield self._table
            yield RunCard(id="card")
            yield OverlayChart(named=False, id="preview")
        yield PromptLine()

    def on_mount(self) -> None:
        if self._clocked:
            self.set_interval(2.0, self._list_if_current)

    def on_screen_resume(self) -> None:
        self._list_runs()

    def _list_if_current(self) -> None:
        if self.is_current and not self._is_listing and time.monotonic() >= self._quiet_until:
            self._list_runs()

    @work(group="history")
    async def _list_runs(self) -> None:
        if self._is_listing:
            self._list_again = True
            return
        self._is_listing = True
        try:
            self._list_again = True
            while self._list_again:
                self._list_again = False
                began = time.monotonic()
                await self._read_runs()
                ended = time.monotonic()
                self._quiet_until = ended + 10 * (ended - began)  # a folder of 100,000 runs is listed less often
        finally:
            self._is_listing = False

    async def _read_runs(self) -> None:
        """Show the runs as they are read; where their folder cannot be read, none: a launch reports why."""
        parts = self._listing.read(now=self._now())
        try:
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                self._show_runs(part)
        except RequestError:
            self._show_runs(ListedRuns(entries=[], unread=0))

    def _show_runs(self, part: ListedRuns) -> None:
        if part.unread and len(part.entries) < len(self._table.listed or ()):
            return  # all were listed before
        if part.entries != self._table.listed or part.unread != self._table.unread:
            self._table.show(part.entries, unread=part.unread)
            self._show_card()

    @on(RunList.Moved)
    def _pointed(self, event: RunList.Moved) -> None:
        self._show_card()

    def _show_card(self) -> None:
        card = self.query_one(RunCard)
        card.entry = self._table.entry
        least_lines = 5  # for most runs, so that the list keeps its place
        card.styles.height = max(least_lines, min(len(card.details(self.size.width - 2)), self.size.height // 3))
        card.redraw()
        self._preview(self.run_at_cursor)
        self.tick()

    def _preview(self, run: Run | None) -> None:
        curves = self.query_one("#preview", OverlayChart)
        curves.display = run is not None and self.size.height >= 30  # fewest lines with curves
        if run is not None and curves.display and [shown.id for shown in curves.runs] != [run.id]:
            curves.styles.height = self.size.height * 2 // 5
            curves.show([run])

    def on_resize(self, event: Resize) -> None:
        self._show_card()

    def tick(self) -> None:
        self.query_one("#preview", OverlayChart).tick()

    @property
    def run_at_cursor(self) -> Run | None:
        entry = self._table.entry
        return None if entry is None else open_run(Path(entry["run_dir"]))

    # Sorting and filtering

    def action_sort(self) -> None:
        self._table.sort_key = next_of(self._table.sort_keys, self._table.sort_key)
        self._show_entries()

    def action_reverse(self) -> None:
        self._table.reverse = not self._table.reverse
        self._show_entries()

    def _show_entries(self) -> None:
        self._table.update_entries()
        self._show_card()

    def action_filter(self) -> None:
        hint = "state:failed  loss<2  tags:baseline  !recipe:demo"
        self._open_prompt("filter", "filter", self._table.filter.text, hint)

    def action_note(self) -> None:
        run, entry = self.run_at_cursor, self._table.entry
        if run is not None and entry is not None:
            self._open_prompt("note", f"note of {run.id}", entry["note"] or "", "one line; empty: none")

    def action_tags(self) -> None:
        run, entry = self.run_at_cursor, self._table.entry
        if run is not None and entry is not None:
            hint = "words such as baseline lr-sweep; empty: none"
            self._open_prompt("tags", f"tags of {run.id}", " ".join(entry["tags"]), hint)

    def _open_prompt(self, purpose: Literal["filter", "note", "tags"], label: str, text: str, hint: str) -> None:
        self._prompt_for = purpose
        self._edited_run = self.run_at_cursor
        self.query_one(PromptLine).open(label, text, hint)

    @on(Input.Changed, "#editor")
    def _typed(self, event: Input.Changed) -> None:
        if self._prompt_for == "filter":
            self._set_filter(event.value)

    @on(Input.Submitted, "#editor")
    def _submitted(self, event: Input.Submitted) -> None:
        self.action_commit(1)

    def action_commit(self, step: int) -> None:
        """Apply the typed text and close the line; if it is invalid, report why and keep the line open."""
        purpose, typed = self._prompt_for, self.query_one("#editor", Input).value
        try:
            if purpose == "filter":
                self._set_filter(typed, complain=True)
            elif purpose is not None and self._edited_run is not None:
                self._write_note(self._edited_run, purpose, typed)
        except RequestError as error:
            self.console.report(str(error), alarm=True)
            return
        self._leave_line()

    def action_back(self) -> None:
        """Close the input line without a change; on the filter's line, or without an open one, remove the filter."""
        if self._prompt_for is None or self._prompt_for == "filter":
            self._set_filter("")
        self._leave_line()

    def watch_focused(self, focused: Widget | None) -> None:
        """Close the line when a click moves the focus: letters typed there would be commands."""
        if self._prompt_for is not None and focused is not None and focused.id != "editor":
            self._leave_line()

    def _leave_line(self) -> None:
        if self._prompt_for is not None:
            self._prompt_for = None
            self.query_one(PromptLine).close()
            self._table.focus()

    def _set_filter(self, text: str, *, complain: bool = False) -> None:
        try:
            self._table.filter = run_filter(text)
        except RequestError as error:
            if complain:
                raise with_metric(error, text, self._table.listed or ()) from None
            return  # a word is still being typed
        self._show_entries()

    def _write_note(self, run: Run, kind: Literal["note", "tags"], typed: str) -> None:
        before = read_notes(run.dir)
        if kind == "note":
            after = msgspec.structs.replace(before, note=checked_note(typed))
        else:
            after = msgspec.structs.replace(before, tags=checked_tags(typed.split()))
        write_notes(run, after)
        self._list_runs()

    # Actions on a run

    @on(RunList.Chosen)
    async def _chosen(self, event: RunList.Chosen) -> None:
        await self.action_open()

    async def action_open(self) -> None:
        if (run := self.run_at_cursor) is not None:
            await self.console.open_run(run)

    def action_mark(self) -> None:
        if self.run_at_cursor is not None and not self._table.mark():
            self.console.report(f"at most {MAX_RUNS} runs can be compared")

    def action_compare(self) -> None:
        # A marked run may have become unreadable since.
        folder = paths.runs_folder()
        marked = [run for name in self._table.marked if (run := open_run(folder / name)) is not None]
        if len(marked) < MIN_RUNS:
            self.console.report(f"mark {MIN_RUNS} to {MAX_RUNS} runs with space, then compare them")
            return
        from gputrain_tui.console.screens.compare_screen import CompareScreen

        self.app.push_screen(CompareScreen(marked))

    def action_resume(self) -> None:
        if (run := self.run_at_cursor) is not None:
            confirm_resume(self.console, run)

    async def action_relaunch(self) -> None:
        if (run := self.run_at_cursor) is not None:
            await relaunch(self.console, run)

    def action_stop_marked(self) -> None:
        run = self.run_at_cursor
        if run is not None and run.state in ENDED:
            self.console.report(f"{run.id} has ended: {run.state}")
        elif run is not None:
            confirm_stop(self.console, run)

    def action_delete(self) -> None:
        if (run := self.run_at_cursor) is None:
            return
        if run.state not in (*ENDED, "lost"):
            self.console.report(f"{run.id} is {run.state}; S stops it", alarm=True)
            return
        consequence = "This deletes its record, logs and checkpoints."
        self.console.confirm(f"Delete {run.id}?", consequence, yes="Delete it", act=partial(self._delete, run))

    @work(group="delete")
    async def _delete(self, run: Run) -> None:
        try:
            await asyncio.to_thread(delete_run, run)
        except RequestError as error:
            self.console.report(str(error), alarm=True)
        else:
            self.console.report(f"deleted {run.id}")
        self._list_runs()
