"""Log panel of all ranks or of one, which follows the end until it is scrolled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Offset
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import Canvas, Copyable, role_classes
from gputrain_tui.console.widgets.drawing import Row, cell_count, centred_text, scroll_thumb, title_row
from gputrain_tui.console.widgets.line_input import LineInput
from gputrain_tui.console.widgets.log_line import decoded, line_strip, prefix
from gputrain_tui.history.follow import Follower
from gputrain_tui.history.log_buffer import Level, LogBuffer, LogLine
from gputrain_tui.history.log_times import in_order
from trainer.contract.record import RunDir

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun

LEVEL_NAMES = {Level.ALL: "", Level.WARNING: "warnings and errors", Level.ERROR: "errors only"}


class LogView(Canvas, can_focus=True):
    """Log of a run or of one of its ranks; the screen's clock calls ``tick``."""

    PLACE = "log"
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("log"),
        Binding("tab,shift+tab", "keep_search", "Find", show=False),
    ]

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes("prefix", "match", "current", "thumb", "cursor")

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
    LogView:nocolor > .canvas--match { text-style: underline; }
    LogView:nocolor > .canvas--current { text-style: reverse; }
    LogView > .canvas--thumb { color: $foreground 40%; }
    """

    def __init__(
        self,
        run: RunDir,
        *,
        rank: int | None = None,
        live: LiveRun | None = None,
        lines: int = 50_000,
        id: str | None = None,
    ) -> None:
        """Open the log of a run, or of its ``rank`` only; keep the newest ``lines`` lines.

        The followed run ``live`` has the lines' times and the flagged ranks.
        """
        super().__init__(id=id)
        self.rank = rank
        self._run = run
        self._live = live
        self._lines = lines
        self._top: int | None = None
        """Number of the first line on the screen; None: the end is followed."""
        self._shift = 0
        self._needle = ""
        self._match: int | None = None
        self._missed = False
        self._pointed: int | None = None
        self._painted: object = None
        """Lines' version, flagged ranks and time of the newest sample at the last repaint."""
        self._flagged: set[str] = set()
        self._follower: Follower | None = None
        self.buffer = LogBuffer(lines=lines)
        self._open()

    # Called by the screen

    @property
    def following(self) -> bool:
        return self._top is None

    def show_rank(self, rank: int | None) -> None:
        if rank != self.rank:
            self.rank = rank
            self._open()

    def tick(self) -> None:
        if not self.display:
            return
        tick_bytes = 1 << 20  # most bytes to read per tick, some milliseconds of work
        if self._follower is not None:
            offset = self._follower.offset
            parts = [(name, data, offset(name) - len(data)) for name, data in self._follower.poll(tick_bytes)]
            for name, data, begin in in_order(parts, self._live.log_times if self._live is not None else {}):
                self.buffer.feed(name, data, begin=begin)
                self._missed = False  # a new line may match
        flagged = {str(rank) for rank in self._live.state.flagged} if self._live is not None else set()
        dated = self._live.state.nodes if self._live is not None else {}
        shown = self.buffer.version, flagged, max((sample.time for sample in dated.values()), default=0.0)
        if shown != self._painted:
            self._painted, self._flagged = shown, flagged
            self.redraw()

    def _open(self) -> None:
        level = self.buffer.level
        self.on_unmount()
        self.buffer = LogBuffer(lines=self._lines)
        self.buffer.set_level(level)
        self._top, self._shift, self._match, self._missed, self._painted = None, 0, None, False, None
        self._pointed = None
        only = None if self.rank is None else {str(self.rank)}
        backlog_bytes = 4 << 20  # bytes of earlier output to read at the start
        self._follower = Follower(self._run.logs, ".log", only=only, torn=True, last_bytes=backlog_bytes)

    def on_unmount(self) -> None:
        if self._follower is not None:
            self._follower.close()

    # Scrolling

    @property
    def page(self) -> int:
        """Lines of the log that fit between the title and the search line, if that is open."""
        return max(self.size.height - 1 - self.has_class("-searching"), 1)

    @property
    def top_row(self) -> int:
        """Index of the first line on the screen, among those that the level shows."""
        last = max(self.buffer.rows - self.page, 0)
        return last if self._top is None else min(self.buffer.row(self._top), last)

    def _go(self, row: int) -> None:
        """Scroll to a row; at the end it is followed again."""
        row = max(row, 0)
        self._top = None if row >= self.buffer.rows - self.page else self.buffer.number(row)
        self.redraw()

    def action_scroll_lines(self, lines: int) -> None:
        self._go(self.top_row + lines)

    def action_scroll_pages(self, pages: int) -> None:
        self.action_scroll_lines(pages * max(self.page - 1, 1))

    def action_oldest(self) -> None:
        self._go(0)

    def action_follow(self) -> None:
        self._go(self.buffer.rows)

    def action_edge(self, side: int) -> None:
        self._go(0 if side < 0 else self.buffer.rows)

    def action_shift(self, steps: int) -> None:
        shift_cells = 16  # cells by which a key moves long lines sideways
        self._shift = max(self._shift + steps * shift_cells, 0)
        self.redraw()

    def wheel(self, lines: int) -> None:
        self.action_scroll_lines(lines)

    def on_click(self, event: Click) -> None:
        if event.widget is not self or event.y <= 0:
            return
        if event.x == self.size.width - 1:
            self._go((self.buffer.rows - self.page) * (event.y - 1) // max(self.page - 1, 1))
        elif (row := self.top_row + event.y - 1) < self.buffer.rows:
            self._pointed, self._match = self.buffer.number(row), None
            self.redraw()

    @property
    def cursor(self) -> int | None:
        """Number of the line for the copy key: the found or clicked one if it is in view, else the last in view."""
        last = min(self.top_row + self.page, self.buffer.rows) - 1
        for number in (self._match, self._pointed):
            if number is not None and self.top_row <= self.buffer.row(number) <= last:
                return number
        return self.buffer.number(last) if last >= 0 else None

    def copyable(self) -> Copyable | None:
        number = self.cursor
        return None if number is None else Copyable(self._text(number), "a line of the log")

    def _text(self, number: int) -> str:
        return "".join(text for text, _ in decoded(self.buffer.line(number).raw))

    # Selection: by numbers of lines, so that it stays on them while others are appended

    def text_line(self, y: int) -> int:
        """Return the number of the line at ``y``; -1 for the title."""
        row = self.top_row + y - 1
        return self.buffer.number(row) if 0 < y <= self.page and row < self.buffer.rows else -1

    def text_offset(self, x: int, y: int) -> Offset:
        last = min(self.page, self.buffer.rows - self.top_row)
        return super().text_offset(x, min(max(y, 1), last))

    def text_strip(self, line: int) -> Strip:
        before = len(self._clock(self.buffer.line(line))) + self._prefix_cells()
        return self._line_strip(line, before + cell_count(self._text(line)))

    def text_lines(self) -> Iterable[int]:
        return map(self.buffer.number, range(self.buffer.rows))

    def selection_updated(self, selection: Selection | None) -> None:
        """Repaint; with a selection stop following the end, so that the selected lines stay in view."""
        if selection is not None and self.following and self.buffer.rows:
            self._top = self.buffer.number(self.top_row)
        self.redraw()

    # Level and search

    def action_level(self) -> None:
        self.buffer.set_level(Level((self.buffer.level + 1) % len(Level)))
        self._match = None
        self.redraw()

    def action_search(self) -> None:
        self.add_class("-searching")
        field = self.query_one(Input)
        field.value = self._needle
        field.focus()
        self.redraw()

    def action_next_match(self) -> None:
        self._search(forward=True)

    def action_next_flagged(self) -> None:
        start = self.top_row - 1 if self._match is None else self.buffer.row(self._match)
        row = self.buffer.find_of(self._flagged, start)
        if row is not None:
            self._match = self.buffer.number(row)
            self._top = self.buffer.number(max(row - self.page // 2, 0))
            self.redraw()

    def action_previous_match(self) -> None:
        self._search(forward=False)

    def action_clear_search(self) -> None:
        self._needle, self._match, self._missed = "", None, False
        if self.has_class("-searching"):
            self.remove_class("-searching")
            self.screen.set_focus(self)
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is enabled; Escape, for one, only if there is a search to clear."""
        if action == "keep_search":
            return self.has_class("-searching")
        if action == "clear_search":
            return bool(self._needle) or self.has_class("-searching")
        if action == "next_flagged":
            return self.rank is None  # in one rank's log the key is the screen's: next flagged rank
        return True

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._needle, self._missed = event.value, False
        self.redraw()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_keep_search()

    def action_keep_search(self) -> None:
        self.screen.set_focus(self)
        self.remove_class("-searching")
        self._match = None
        self._search(forward=True)

    def on_mount(self) -> None:
        self.watch(self.screen, "focused", self._focus_moved, init=False)

    def _focus_moved(self, focused: Widget | None) -> None:
        """Close the search line when a click moves the focus: letters typed there would be commands."""
        if focused is not None and focused.parent is not self and self.has_class("-searching"):
            self.remove_class("-searching")
            self.redraw()

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
            elif self.following:  # stop following, so that the found line stays in view
                self._top = self.buffer.number(self.top_row)
        self.redraw()

    # Drawing

    def compose(self) -> ComposeResult:
        yield LineInput(placeholder="search the log, Enter finds, Esc leaves", compact=True)

    def draw(self, width: int, height: int) -> list[Row]:
        return [self.head(width), *([] if self.buffer.rows else centred_text(width, self.page, self._empty_texts()))]

    def redraw(self) -> None:
        self._drawn_size = None
        self.refresh()

    def line(self, y: int) -> Strip:
        width = self.size.width
        rows = self.buffer.rows
        row = self.top_row + y - 1
        overflows = rows > self.page
        if y == 0 or row >= rows or y > self.page:
            return super().line(y)
        number = self.buffer.number(row)
        strip = self._line_strip(number, width - overflows)
        if overflows:
            thumb = "┃" if y - 1 in scroll_thumb(self.top_row, self.page, rows) else " "
            strip = Strip([*strip, Segment(thumb, self.role("thumb"))], width)
        return strip

    def _line_strip(self, number: int, width: int) -> Strip:
        line = self.buffer.line(number)
        ground = "@cursor" if self.has_focus and number == self.cursor else ""
        styles = {role: self.role(role + ground) for role in ("base", "prefix", "warning", "error", "dim")}
        return line_strip(
            line,
            styles | {role: self.role(role) for role in ("match", "current")},
            width=width,
            shift=self._shift,
            prefix_cells=self._prefix_cells(),
            clock=self._clock(line),
            flagged=self._live is not None and line.name in self._flagged,
            needle=self._needle,
            at_match=number == self._match,
        )

    def _prefix_cells(self) -> int:
        """Return the cells of a line's source; 0 if there is only one source."""
        several = self.rank is None and len(self.buffer.names) > 1
        return max(len(prefix(name, 0)) for name in self.buffer.names) if several else 0

    def _clock(self, line: LogLine) -> str:
        """Return the time of a line as text: blanks if unknown; empty if no line has one or the panel is too narrow."""
        clock_from_cells = 56  # fewest cells of a panel that shows the time of each line
        if self._live is None or not self._live.log_times or self.size.width < clock_from_cells:
            return ""
        times = self._live.log_times.get(line.name)
        at = times.at(line.end) if times is not None else None
        if times is not None and at is None and self._live.over and self._live.caught_up and line.end > times.last:
            at = self._live.state.time  # printed after the last sample
        return time.strftime("%H:%M:%S ", time.localtime(at)) if at is not None else " " * 9

    def head(self, width: int) -> Row:
        whose = "all ranks" if self.rank is None else f"rank {self.rank}"
        notes = [(LEVEL_NAMES[self.buffer.level], "accent")] if self.buffer.level else []
        if self._needle and not self.has_class("-searching"):
            notes.append((f"/{self._needle}", "warning" if self._missed else "accent"))
            notes += [("not found", "warning")] if self._missed else []
        if self._shift:
            notes.append((f"from column {self._shift + 1}", "dim"))
        if not self.following:
            below = self.buffer.rows - self.page - self.top_row
            notes.append((f"{below:,} lines below, End follows" if below > 0 else "End follows", "accent"))
        return title_row(width, [("log", "title"), (f"  {whose}", "dim")], [[note] for note in notes])

    def _empty_texts(self) -> list[str]:
        if self.buffer.level and self.buffer.names:
            return [f"every line is below the level: {LEVEL_NAMES[self.buffer.level]}", "L changes the level"]
        if self.rank is not None:
            return [f"rank {self.rank} has printed nothing yet", "the log of all ranks is on the run's screen"]
        return ["nothing was printed yet"]
