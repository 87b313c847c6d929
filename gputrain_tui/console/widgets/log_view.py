"""Log panel of all ranks or one: follows the end until it is scrolled."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Click, Unmount
from textual.strip import Strip
from textual.widgets import Input

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import Canvas, role_classes
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, scroll_thumb, title_row
from gputrain_tui.console.widgets.log_line import line_strip, prefix
from gputrain_tui.history.follow import Follower
from gputrain_tui.history.log_buffer import Level, LogBuffer
from trainer.contract.record import RunDir

TICK_BYTES = 1 << 20
"""Most bytes read per tick, some milliseconds of work."""
BACKLOG_BYTES = 4 << 20
"""Bytes of earlier output that are read at the start."""
SHIFT_CELLS = 16
"""Cells that a long line moves sideways at a time."""
LEVEL_NAMES = {Level.ALL: "", Level.WARNING: "warnings and errors", Level.ERROR: "errors only"}
LINE_ROLES = ("base", "prefix", "warning", "error", "match", "current", "dim")


class LogView(Canvas, can_focus=True):
    """The log of a run, or of one rank of it; ``tick`` is called by the screen's clock."""

    PLACE = "log"
    """Its name in the action table: its keys stand in the footer while it has the focus."""
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("log")]

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes("prefix", "match", "current", "thumb")

    DEFAULT_CSS = """
    LogView { layout: vertical; }
    LogView > Input { dock: bottom; height: 1; border: none; padding: 0 1; background: $surface; display: none; }
    LogView.-searching > Input { display: block; }
    LogView:ansi > .canvas--prefix { text-style: dim; }
    LogView > .canvas--prefix { color: $foreground 45%; }
    LogView:light > .canvas--prefix { color: $foreground 60%; }
    LogView > .canvas--error { text-style: none; }
    LogView > .canvas--match { background: $accent 35%; }
    LogView > .canvas--current { background: $accent; color: $background; }
    LogView > .canvas--thumb { color: $foreground 40%; }
    """

    def __init__(
        self,
        run: RunDir,
        *,
        rank: int | None = None,
        lines: int = 50_000,
        id: str | None = None,
    ) -> None:
        """Show what a run prints, all ranks or one; ``lines`` are kept."""
        super().__init__(id=id)
        self._run = run
        self._rank = rank
        self._lines = lines
        self._top: int | None = None
        """Number of the first line on the screen; None: the end is followed."""
        self._shift = 0
        self._needle = ""
        self._match: int | None = None
        """Number of the line that the search has found."""
        self._missed = False
        self._painted = -1
        self._follower: Follower | None = None
        self.buffer = LogBuffer(lines=lines)
        """The newest lines."""
        self._open()

    # What the screen calls

    @property
    def rank(self) -> int | None:
        """The only rank that is shown; None: all."""
        return self._rank

    @property
    def following(self) -> bool:
        """Whether the newest line stays in view."""
        return self._top is None

    def show_rank(self, rank: int | None) -> None:
        """Show one rank, or all for None."""
        if rank != self._rank:
            self._rank = rank
            self._open()

    def tick(self) -> None:
        """Read what was printed; repaint if there was something."""
        if not self.display:
            return
        if self._follower is not None:
            for name, data in self._follower.poll(TICK_BYTES):
                self.buffer.feed(name, data)
                self._missed = False  # what came may match
        if self.buffer.version != self._painted:
            self._painted = self.buffer.version
            self.redraw()

    def _open(self) -> None:
        level = self.buffer.level
        if self._follower is not None:
            self._follower.close()
        self.buffer = LogBuffer(lines=self._lines)
        self.buffer.set_level(level)
        self._top, self._shift, self._match, self._missed, self._painted = None, 0, None, False, -1
        only = None if self._rank is None else {str(self._rank)}
        self._follower = Follower(self._run.logs, ".log", only=only, torn=True, last_bytes=BACKLOG_BYTES)

    # Where it is scrolled to

    @property
    def page(self) -> int:
        """Lines of the log that fit under the title, and over the search line while that is open."""
        return max(self.size.height - 1 - self.has_class("-searching"), 1)

    @property
    def top_row(self) -> int:
        """Row of the first line on the screen."""
        last = max(self.buffer.rows - self.page, 0)
        return last if self._top is None else min(self.buffer.row(self._top), last)

    def scroll_rows(self, rows: int) -> None:
        """Move by so many lines; scrolling past the end follows it again."""
        self._go(self.top_row + rows)

    def _go(self, row: int) -> None:
        row = max(row, 0)
        following = row >= self.buffer.rows - self.page
        self._top = None if following else self.buffer.number(row)
        self.redraw()

    def action_scroll_lines(self, lines: int) -> None:
        """Move by lines."""
        self.scroll_rows(lines)

    def action_scroll_pages(self, pages: int) -> None:
        """Move by pages, one line less than the screen holds."""
        self.scroll_rows(pages * max(self.page - 1, 1))

    def action_oldest(self) -> None:
        """Go to the oldest line that is kept."""
        self._go(0)

    def action_follow(self) -> None:
        """Go to the end and follow it."""
        self._top = None
        self.redraw()

    def action_shift(self, steps: int) -> None:
        """Move long lines sideways."""
        self._shift = max(self._shift + steps * SHIFT_CELLS, 0)
        self.redraw()

    def wheel(self, lines: int) -> None:
        """Move by lines."""
        self.scroll_rows(lines)

    def on_click(self, event: Click) -> None:
        """Jump where the bar at the right is clicked."""
        if event.widget is self and event.x == self.size.width - 1 and event.y > 0:
            self._go((self.buffer.rows - self.page) * (event.y - 1) // max(self.page - 1, 1))

    def on_unmount(self, event: Unmount) -> None:
        """Close the files."""
        if self._follower is not None:
            self._follower.close()

    # Level and search

    def action_level(self) -> None:
        """Show all lines, those from warnings on, or errors only, in turn."""
        self.buffer.set_level(Level((self.buffer.level + 1) % len(Level)))
        self._match = None
        self.redraw()

    def action_search(self) -> None:
        """Ask what to search for."""
        self.add_class("-searching")
        field = self.query_one(Input)
        field.value = self._needle
        field.focus()
        self.redraw()

    def action_next_match(self) -> None:
        """Go to the next line that holds the text."""
        self._search(forward=True)

    def action_previous_match(self) -> None:
        """Go to the line before that holds the text."""
        self._search(forward=False)

    def action_clear_search(self) -> None:
        """Forget the search."""
        searching = self.has_class("-searching")
        self._needle, self._match, self._missed = "", None, False
        self.remove_class("-searching")
        if searching:
            self.focus()
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is enabled: Escape only clears a search."""
        if action == "clear_search":
            return bool(self._needle) or self.has_class("-searching")
        return True

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._needle, self._missed = event.value, False
        self.redraw()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.remove_class("-searching")
        self.focus()
        self._match = None
        self._search(forward=True)

    def _search(self, *, forward: bool) -> None:
        if not self._needle:
            return
        start = self.top_row - forward if self._match is None else self.buffer.row(self._match)
        row = self.buffer.find(self._needle, start, forward=forward)
        self._missed = row is None
        if row is not None:
            self._match = self.buffer.number(row)
            if not self.top_row <= row < self.top_row + self.page:
                self._go(row - self.page // 2)
            elif self.following:  # what was found stays in view
                self._top = self.buffer.number(self.top_row)
        self.redraw()

    # How it is drawn

    def compose(self) -> ComposeResult:
        """Yield the search line, hidden until it is used."""
        yield Input(placeholder="search the log, Enter finds, Esc leaves", compact=True)

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the title line, and the text of an empty log."""
        return [self.head(width), *([] if self.buffer.rows else centred_text(width, self.page, self._nothing()))]

    def redraw(self) -> None:
        """Draw again with the next frame."""
        self._drawn_size = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget."""
        width = self.size.width
        rows = self.buffer.rows
        row = self.top_row + y - 1
        overflows = rows > self.page
        if y == 0 or row >= rows or y > self.page:
            return super().render_line(y)
        number = self.buffer.number(row)
        several = self._rank is None and len(self.buffer.names) > 1
        strip = line_strip(
            self.buffer.line(number),
            {role: self.role(role) for role in LINE_ROLES},
            width=width - overflows,
            shift=self._shift,
            prefix_cells=max(len(prefix(name, 0)) for name in self.buffer.names) if several else 0,
            needle=self._needle,
            at_match=number == self._match,
        )
        if overflows:
            mark = "┃" if y - 1 in scroll_thumb(self.top_row, self.page, rows) else " "
            strip = Strip([*strip, Segment(mark, self.role("thumb"))], width)
        return strip

    def head(self, width: int) -> Row:
        """Return the title line: whose log, what is left out, and whether the end is followed."""
        whose = "all ranks" if self._rank is None else f"rank {self._rank}"
        remarks: list[Row] = []
        if self.buffer.level:
            remarks.append([(LEVEL_NAMES[self.buffer.level], "accent")])
        if self._needle and not self.has_class("-searching"):
            remarks.append([(f"/{self._needle}", "warning" if self._missed else "accent")])
            if self._missed:
                remarks.append([("not found", "warning")])
        if self._shift:
            remarks.append([(f"from column {self._shift + 1}", "dim")])
        below = self.buffer.rows - self.page - self.top_row
        if not self.following:
            remarks.append([(f"{below:,} lines below, End follows", "accent")])
        return fit_row(title_row(width, [("log", "title"), (f"  {whose}", "dim")], remarks), width)

    def _nothing(self) -> list[str]:
        if self.buffer.level and self.buffer.names:
            return [f"nothing here but lines below the level: {LEVEL_NAMES[self.buffer.level]}", "L changes the level"]
        if self._rank is not None:
            return [f"rank {self._rank} has printed nothing yet", "the log of all ranks is on the run's screen"]
        return ["nothing was printed yet"]
