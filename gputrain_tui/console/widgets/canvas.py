"""Widgets of the screens without a run: one that draws rows of (text, role), and a list with a cursor."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gputrain_tui.console.ramp import ON_GROUND, ramp_for
from gputrain_tui.console.widgets.abstract_widget import AbstractWidgetMeta
from gputrain_tui.console.widgets.drawing import Row

ROLES = (
    "title",
    "bright",
    "dim",
    "rule",
    "accent",
    "warning",
    "error",
    "good",
    "bar",
    "key",
    "cursor",
    "cursor-unfocused",
    "curve-0",
    "curve-1",
    "curve-2",
    "curve-3",
    "curve-4",
    "curve-5",
)

ON_CURSOR = {"dim": "bright"}
"""Roles that are brighter on the cursor's ground, where dim ones could not be read."""


class Canvas(Widget, metaclass=AbstractWidgetMeta):
    """Widget that draws rows of (text, role) on ``redraw``."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"canvas--{role}" for role in ROLES}

    DEFAULT_CSS = """
    Canvas { height: 1fr; width: 1fr; }
    Canvas > .canvas--title { color: $foreground; text-style: bold; }
    Canvas:focus > .canvas--title { color: $text-accent; text-style: bold; }
    Canvas > .canvas--bright { color: $foreground; }
    Canvas > .canvas--dim { color: $foreground 60%; }
    Canvas > .canvas--rule { color: $foreground 20%; }
    Canvas > .canvas--accent { color: $text-accent; }
    Canvas > .canvas--warning { color: $text-warning; }
    Canvas > .canvas--error { color: $text-error; text-style: bold; }
    Canvas:nocolor > .canvas--error { color: $foreground; }
    Canvas > .canvas--good { color: $text-success; }
    Canvas > .canvas--bar { color: $primary 80%; }
    Canvas > .canvas--key { color: $text-accent; text-style: bold; }
    Canvas > .canvas--cursor { background: $primary 45%; }
    Canvas > .canvas--cursor-unfocused { background: $foreground 12%; }
    Canvas:light > .canvas--dim { color: $foreground 70%; }
    Canvas:light > .canvas--cursor { background: $primary 20%; }
    Canvas:ansi > .canvas--dim { text-style: dim; }
    Canvas:ansi > .canvas--rule { text-style: dim; }
    Canvas:ansi > .canvas--cursor { background: ansi_blue; }
    Canvas:ansi > .canvas--cursor-unfocused { background: ansi_bright_black; }
    Canvas > .canvas--curve-0 { color: $text-accent; }
    Canvas > .canvas--curve-1 { color: $text-primary; }
    Canvas > .canvas--curve-2 { color: $text-success; }
    Canvas > .canvas--curve-3 { color: $text-error; }
    Canvas > .canvas--curve-4 { color: $text-secondary; }
    Canvas > .canvas--curve-5 { color: $foreground 60%; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: list[Row] = []
        self._drawn_for: object = None
        self._generation = 0
        self._styles: dict[str, Style] = {}

    @abstractmethod
    def draw(self, width: int, height: int) -> list[Row]:
        """Return at most ``height`` rows."""

    def redraw(self) -> None:
        """Draw again with the next frame."""
        self._generation += 1
        self.refresh()

    def notify_style_update(self) -> None:
        """Forget the colours of the former theme."""
        super().notify_style_update()
        self._styles.clear()

    def render_line(self, y: int) -> Strip:
        """Return one line."""
        width, height = self.size
        wanted = (width, height, self._generation)
        if wanted != self._drawn_for:
            self._rows = self.draw(width, height)
            self._drawn_for = wanted
        row = self._rows[y] if y < len(self._rows) else []
        return self._strip(row, width, self._ground(y))

    def _ground(self, y: int) -> Style | None:
        """Return the colour behind a line where it differs from the widget's."""
        return None

    def _strip(self, row: Row, width: int, ground: Style | None) -> Strip:
        base = self.rich_style if ground is None else self.rich_style + ground
        plain = ground is not None and ramp_for(self.app).plain_cursor
        segments = []
        for text, role in row:
            style = self.role(role if ground is None else ON_CURSOR.get(role, role))
            if ground is not None and ground.bgcolor is not None:
                style += Style(bgcolor=ground.bgcolor)
                if plain:
                    style += ON_GROUND
            segments.append(Segment(text, style))
        return Strip(segments).adjust_cell_length(width, base)

    def role(self, role: str) -> Style:
        """Return the colours of a role."""
        style = self._styles.get(role)
        if style is None:
            style = self.rich_style
            if role != "base":
                style += self.get_component_rich_style(f"canvas--{role}")
            self._styles[role] = style
        return style


class Listing(Canvas, can_focus=True):
    """List with a cursor; a subclass provides the rows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "edge(-1)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]

    class Moved(Message):
        """The cursor stands on another row."""

        def __init__(self, listing: Listing, index: int) -> None:
            super().__init__()
            self.listing = listing
            self.index = index

        @property
        def control(self) -> Listing:
            """The list."""
            return self.listing

    class Chosen(Message):
        """A row was chosen, with Enter or a click on the cursor."""

        def __init__(self, listing: Listing, index: int) -> None:
            super().__init__()
            self.listing = listing
            self.index = index

        @property
        def control(self) -> Listing:
            """The list."""
            return self.listing

    head_rows = 1
    """Lines above the rows that do not scroll."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.cursor = 0
        """Index of the row with the cursor."""
        self._top = 0

    # Provided by subclasses

    @abstractmethod
    def count(self) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def head(self, width: int) -> list[Row]:
        """Return the lines above."""

    @abstractmethod
    def row(self, index: int, width: int) -> Row:
        """Return one row."""

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the rows of an empty list."""
        return []

    def selectable(self, index: int) -> bool:
        """Return whether the cursor may be on a row."""
        return True

    # Drawing

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the head and the rows around the cursor."""
        count = self.count()
        head = self.head(width)[:height]
        if count > height - len(head):  # the bar at the right takes two cells of every row
            head = self.head(width - 2)[:height]
        self.head_rows = len(head)
        room = height - len(head)
        if not count:
            return head + self.empty(width, room)
        self.cursor = min(max(self.cursor, 0), count - 1)
        self._top = min(max(self._top, self.cursor - room + 1, 0), self.cursor, max(count - room, 0))
        if self.cursor and self._top == self.cursor and not any(map(self.selectable, range(self._top))):
            self._top = 0
        overflows = count > room
        rows = [self.row(index, width - 2 * overflows) for index in range(self._top, min(self._top + room, count))]
        if not overflows:
            return head + rows
        size = max(round(room * room / count), 1)
        start = round((room - size) * self._top / max(count - room, 1))
        barred = []
        for y, row in enumerate(rows):
            used = Strip([Segment(text) for text, _ in row]).cell_length
            bar = "┃" if start <= y < start + size else " "
            barred.append([*row, (" " * max(width - 1 - used, 0), "base"), (bar, "dim")])
        return head + barred

    def _ground(self, y: int) -> Style | None:
        if self.count() and y - self.head_rows + self._top == self.cursor and y >= self.head_rows:
            return self.role("cursor" if self.has_focus else "cursor-unfocused")
        return None

    def on_focus(self) -> None:
        """Draw the cursor of a focused list."""
        self.redraw()

    def on_blur(self) -> None:
        """Draw the cursor of a list without focus."""
        self.redraw()

    # Moving

    def go(self, index: int, *, step: int = 1) -> None:
        """Put the cursor on a row, or on the next that may have it in the direction of ``step``."""
        count = self.count()
        index = min(max(index, 0), count - 1)
        while 0 <= index < count and not self.selectable(index):
            index += step
        if not 0 <= index < count:
            return
        moved = index != self.cursor
        self.cursor = index
        self.redraw()
        if moved:
            self.post_message(self.Moved(self, index))

    def action_move(self, rows: int) -> None:
        """Move by rows."""
        self.go(self.cursor + rows, step=1 if rows > 0 else -1)
        if rows < 0 and self._top and not any(map(self.selectable, range(self.cursor))):
            self._top = 0  # a heading above the first row comes into view with it

    def action_page(self, pages: int) -> None:
        """Move by pages."""
        page = max(self.size.height - self.head_rows - 1, 1)
        self.go(self.cursor + pages * page, step=1 if pages > 0 else -1)

    def action_edge(self, side: int) -> None:
        """Go to the first or the last row."""
        self.go(0 if side < 0 else self.count() - 1, step=-side)

    def action_choose(self) -> None:
        """Choose the row with the cursor."""
        if self.count():
            self.post_message(self.Chosen(self, self.cursor))

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move up with the wheel."""
        event.stop()
        self.action_move(-3)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move down with the wheel."""
        event.stop()
        self.action_move(3)

    def on_click(self, event: Click) -> None:
        """Move the cursor to the clicked row; a click on the cursor chooses it."""
        index = event.y - self.head_rows + self._top
        if event.y < self.head_rows or not 0 <= index < self.count() or not self.selectable(index):
            return
        if index == self.cursor:
            self.action_choose()
        else:
            self.go(index)
