"""Base of the widgets that draw rows of (text, role), and of lists with a cursor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Event, MouseScrollDown, MouseScrollUp
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from gputrain_tui.console.ramp import TEXT_ON_CURSOR, Ramp, pair, ramp_for
from gputrain_tui.console.textual_internals import AbstractWidgetMeta
from gputrain_tui.console.widgets.drawing import Row, fit_row, scroll_thumb
from gputrain_tui.state.totals import PHASES

ON_CURSOR = {"dim": "bright", "quiet": "bright", "value": "bright", "absent": "value", "error-text": "bright"}
"""Brighter roles for text on the cursor's background, where dim text could not be read."""
WITHOUT_COLOURS = {"cursor": Style(reverse=True), "cursor-unfocused": Style(underline=True)}
CURVES = tuple(f"curve-{number}" for number in range(6))


def role_classes(*roles: str) -> set[str]:
    """Return the component classes of roles; their colours are in the widgets' ``DEFAULT_CSS``."""
    return {f"canvas--{role}" for role in roles}


def with_background(row: Row, ground: str) -> Row:
    """Return a row in the roles of a cursor's background: ``cursor`` or ``cursor-unfocused``."""
    return [(text, f"{ON_CURSOR.get(role, role)}@{ground}") for text, role in row]


class Copyable(NamedTuple):
    """Text for the copy key, and its name in the notification, such as ``a line of the log``."""

    text: str
    label: str


class Canvas(Widget, metaclass=AbstractWidgetMeta):
    """Widget that draws rows of (text, role) for its size on ``redraw``, and repaints the lines that differ.

    Its text can be selected with the mouse; until the selection ends it is not redrawn, so that the copied text is
    the selected one.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(
        "title", "bright", "dim", "rule", "accent", "warning", "error", "good", "bar", "key"
    )

    DEFAULT_CSS = """
    Canvas { height: 1fr; width: 1fr; }
    Canvas > .canvas--title { color: $foreground; text-style: bold; }
    Canvas:focus > .canvas--title { color: $text-accent; text-style: bold; }
    Canvas > .canvas--bright { color: $foreground; }
    Canvas > .canvas--dim, Canvas > .canvas--curve-5 { color: $foreground 60%; }
    Canvas > .canvas--rule { color: $foreground 20%; }
    Canvas > .canvas--accent, Canvas > .canvas--curve-0 { color: $text-accent; }
    Canvas > .canvas--warning { color: $text-warning; }
    Canvas > .canvas--error { color: $text-error; text-style: bold; }
    Canvas:nocolor > .canvas--error { color: $foreground; }
    Canvas > .canvas--good { color: $text-success; }
    Canvas > .canvas--bar { color: $primary 80%; }
    Canvas > .canvas--key { color: $text-accent; text-style: bold; }
    Canvas:light > .canvas--dim { color: $foreground 70%; }
    Canvas:ansi > .canvas--dim { text-style: dim; }
    Canvas:ansi > .canvas--rule { color: ansi_bright_black; }
    Canvas > .canvas--cursor { background: $primary 45%; }
    Canvas > .canvas--cursor-unfocused { background: $foreground 12%; }
    Canvas:light > .canvas--cursor { background: $primary 20%; }
    Canvas:ansi > .canvas--cursor { background: ansi_blue; }
    Canvas:ansi > .canvas--cursor-unfocused { background: ansi_bright_black; }
    Canvas > .canvas--curve-1 { color: $text-primary; }
    Canvas > .canvas--curve-2 { color: $text-success; }
    Canvas > .canvas--curve-3 { color: $text-error; }
    Canvas > .canvas--curve-4 { color: $text-secondary; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._drawn_size: Size | None = None
        self._styles: dict[str, Style] = {}

    @abstractmethod
    def draw(self, width: int, height: int) -> list[Row]:
        """Return at most ``height`` rows."""

    def wheel(self, lines: int) -> None:
        """Scroll by lines; by default nothing scrolls."""

    @property
    def ramp(self) -> Ramp:
        return ramp_for(self.app)

    def redraw(self) -> None:
        """Draw again and repaint the lines that differ; not while text is selected."""
        if self.text_selection is not None:
            return
        if self.size != self._drawn_size:
            self._drawn_size = None  # resized or hidden: the next ``line`` draws all rows again
            self.refresh()
        elif changed := self._draw():
            width = self.size.width
            self.refresh(*(Region(0, begin, width, end - begin) for begin, end in _consecutive(changed)))

    def notify_style_update(self) -> None:
        """Forget the colours of the former theme."""
        super().notify_style_update()
        self._styles.clear()
        self._drawn_size = None

    def on_focus(self) -> None:
        self.redraw()

    def on_blur(self) -> None:
        self.redraw()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.wheel(-3)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.wheel(3)

    def render_line(self, y: int) -> Strip:
        strip = self.line(y)
        selection = self.text_selection
        span = selection.get_span(self.text_line(y)) if selection is not None else None
        return strip if span is None else self._with_selection(strip, span)

    def line(self, y: int) -> Strip:
        if self.size != self._drawn_size:
            self._drawn_size = self.size
            self._rows = []
            self._draw()
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)

    # Selection and copy

    async def on_event(self, event: Event) -> None:
        """Ignore the click that Textual reports at the end of a selection."""
        if not isinstance(event, Click) or self.text_selection is None:
            await super().on_event(event)

    def on_click(self, event: Click) -> Awaitable[None] | None:
        """Prevent Textual's select-all on a double click, which opens the row under the pointer."""
        event.prevent_default()
        return None

    def is_text_at(self, y: int) -> bool:
        """Return whether a selection may begin in the line at ``y``; by default in every line."""
        return True

    def text_line(self, y: int) -> int:
        """Return the number of the text's line that is drawn at ``y``; by default ``y``, where nothing scrolls."""
        return y

    def text_offset(self, x: int, y: int) -> Offset:
        y = min(max(y, 0), max(self.size.height - 1, 0))
        return Offset(min(max(x, 0), max(self.size.width - 1, 0)), self.text_line(y))

    def text_strip(self, line: int) -> Strip:
        """Return a whole line of the text, which may be longer than the widget is wide."""
        return self.line(line)

    def text_lines(self) -> Iterable[int]:
        return range(self.size.height)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        texts = []
        for number in self.text_lines():
            if (span := selection.get_span(number)) is not None:
                strip = self.text_strip(number)
                texts.append(strip.crop(span[0], strip.cell_length if span[1] < 0 else span[1]).text.rstrip())
        return "\n".join(texts), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Repaint with the selection; after its end draw the changes that came meanwhile."""
        if selection is None:
            self.redraw()
        self.refresh()

    def _with_selection(self, strip: Strip, span: tuple[int, int]) -> Strip:
        width = strip.cell_length
        begin, end = span[0], width if span[1] < 0 else min(span[1], width)
        style = self.screen.get_component_rich_style("screen--selection")
        # A theme without a colour for selected text gives the background's colour: keep the text's own then.
        color = style.color if style.color != style.bgcolor else None
        ground = Style(reverse=True) if self.app.no_color else Style(color=color, bgcolor=style.bgcolor)
        selected = Strip(Segment.apply_style(strip.crop(begin, end), post_style=ground))
        return Strip.join([strip.crop(0, begin), selected, strip.crop(end, width)])

    def copyable(self) -> Copyable | None:
        """Return the text for the copy key while the panel has the focus; None: use the screen's."""
        return None

    def _draw(self) -> list[int]:
        """Draw all rows; return the lines that changed."""
        width, height = self.size
        before, self._rows = self._rows, self.draw(width, height)
        if len(before) != len(self._rows):
            self._strips = [self.strip(row, width) for row in self._rows]
            return list(range(max(len(before), len(self._rows))))
        changed = [y for y, row in enumerate(self._rows) if row != before[y]]
        for y in changed:
            self._strips[y] = self.strip(self._rows[y], width)
        return changed

    def strip(self, row: Row, width: int) -> Strip:
        """Return a row as exactly ``width`` cells in the colours of its roles."""
        return Strip(self.segments(row)).adjust_cell_length(width, self.rich_style)

    def segments(self, row: Row) -> list[Segment]:
        styles = self._styles
        return [Segment(text, styles.get(role) or self.role(role)) for text, role in row]

    def role(self, role: str) -> Style:
        """Return the style of a role: ``dim``, ``dim@cursor`` on a background, ``heat:3:7`` of the colour ramp."""
        style = self._styles.get(role)
        if style is None:
            name, _, ground = role.partition("@")
            style = self._plain_style(name)
            if ground:
                style += Style(bgcolor=self.get_component_rich_style(f"canvas--{ground}").bgcolor)
                if self.ramp.plain_cursor:
                    style += TEXT_ON_CURSOR
                if self.app.no_color:
                    style += WITHOUT_COLOURS[ground]
            self._styles[role] = style
        return style

    def _plain_style(self, role: str) -> Style:
        kind, *levels = role.split(":")
        if kind == "heat":
            return self.rich_style + pair(*(self.ramp.heat[int(level)] for level in levels))
        if kind == "phase":
            return self.rich_style + pair(*(self.ramp.phases[PHASES.index(phase)] for phase in levels))
        if role == "base":
            return self.rich_style
        if role == "band-reversed":
            return self._plain_style("band") + Style(reverse=True)
        return self.get_component_rich_style(f"canvas--{role}")


def _consecutive(lines: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each run of consecutive numbers."""
    for _, pairs in groupby(enumerate(lines), key=lambda pair: pair[1] - pair[0]):
        run = [line for _, line in pairs]
        yield run[0], run[-1] + 1


MOVE_KEYS: list[BindingType] = [
    Binding("up,k", "move(-1)", "Up", show=False),
    Binding("down,j", "move(1)", "Down", show=False),
    Binding("pageup", "page(-1)", "Page up", show=False),
    Binding("pagedown", "page(1)", "Page down", show=False),
    Binding("home", "edge(-1)", "First", show=False),
    Binding("end,G", "edge(1)", "Last", show=False),
]
SCROLL_KEYS: list[BindingType] = [
    Binding("up,k", "scroll_by(-1)", "Up", show=False),
    Binding("down,j", "scroll_by(1)", "Down", show=False),
    Binding("pageup", "scroll_by(-8)", "Page up", show=False),
    Binding("pagedown", "scroll_by(8)", "Page down", show=False),
    *MOVE_KEYS[4:],
]


Line = TypeVar("Line")


@dataclass(frozen=True)
class Heading:
    """Line above those of one group, over which the cursor passes."""

    text: str
    indent: str = "  "


class Listing(Canvas, Generic[Line], can_focus=True):
    """List with a cursor; a subclass draws the lines."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes("cursor", "cursor-unfocused", *CURVES)
    BINDINGS: ClassVar[list[BindingType]] = [*MOVE_KEYS, Binding("enter", "choose", "Choose", show=False)]

    @dataclass
    class RowMessage(Message):
        """Message about a row."""

        listing: Listing[Any]

        @property
        def control(self) -> Listing[Any]:
            return self.listing

    class Moved(RowMessage):
        """The cursor stands on another row."""

    class Chosen(RowMessage):
        """A row was chosen, with Enter or a click on the cursor."""

    head_rows = 1
    """Lines above the rows that do not scroll."""
    lines: Sequence[Line | Heading] = ()
    cursor = 0
    """Index of the row with the cursor."""
    _top = 0

    @abstractmethod
    def head(self, width: int) -> list[Row]:
        """Return the rows above the lines, which do not scroll."""

    @abstractmethod
    def row(self, line: Line, width: int) -> Row:
        """Return the row of a line, at most ``width`` cells long."""

    def empty(self, width: int, height: int) -> list[Row]:
        return []

    def key(self, line: Line) -> object:
        """Return what identifies a line when the list is shown anew."""
        return line

    def draw(self, width: int, height: int) -> list[Row]:
        count = len(self.lines)
        head = self.head(width)[:height]
        if count > height - len(head):  # the scroll bar takes two cells of every row
            head = self.head(width - 2)[:height]
        self.head_rows = len(head)
        visible = height - len(head)
        if not count:
            return head + self.empty(width, visible)
        self.cursor = min(max(self.cursor, 0), count - 1)
        self._top = min(max(self._top, self.cursor - visible + 1, 0), self.cursor, max(count - visible, 0))
        if self._top == self.cursor and not any(map(self.selectable, range(self._top))):
            self._top = 0  # a heading above the first row comes into view with it
        overflows = count > visible
        thumb = scroll_thumb(self._top, visible, count)
        rows = []
        for y, index in enumerate(range(self._top, min(self._top + visible, count))):
            line = self.lines[index]
            if isinstance(line, Heading):
                row: Row = [(line.indent, "base"), (line.text, "accent")]
            else:
                row = self.row(line, width - 2 * overflows)
            row = fit_row(row, width - overflows)
            if overflows:
                row.append(("┃" if y in thumb else " ", "dim"))
            if index == self.cursor:
                row = with_background(row, "cursor" if self.has_focus else "cursor-unfocused")
            rows.append(row)
        return head + rows

    # Cursor

    def selectable(self, index: int) -> bool:
        return not isinstance(self.lines[index], Heading)

    @property
    def current(self) -> Line | None:
        """The line under the cursor; None in an empty list."""
        line = self.lines[min(self.cursor, len(self.lines) - 1)] if self.lines else None
        return None if isinstance(line, Heading) else line

    def show_lines(self, lines: Sequence[Line | Heading]) -> None:
        """Show lines; the cursor stays on its line, or else near its place."""
        before = self.current
        self.lines = lines
        index = None if before is None else self._index_of(self.key(before))
        self.cursor = min(self.cursor, max(len(lines) - 1, 0)) if index is None else index
        if lines and not self.selectable(self.cursor):
            self.cursor += 1
        self.redraw()

    def _index_of(self, key: object) -> int | None:
        lines = enumerate(self.lines)
        return next((index for index, line in lines if not isinstance(line, Heading) and self.key(line) == key), None)

    def go_to(self, key: object) -> None:
        """Put the cursor on the line with a key, if there is one."""
        if (index := self._index_of(key)) is not None:
            self.go(index)

    def go(self, index: int, *, step: int = 1) -> None:
        """Put the cursor on a row, or on the next selectable one in the direction of ``step``."""
        count = len(self.lines)
        index = min(max(index, 0), count - 1)
        while 0 <= index < count and not self.selectable(index):
            index += step
        if not 0 <= index < count:
            return
        if index != self.cursor:
            self.post_message(self.Moved(self))
        self.cursor = index
        self.redraw()

    def action_move(self, rows: int) -> None:
        self.go(self.cursor + rows, step=1 if rows > 0 else -1)

    def action_page(self, pages: int) -> None:
        page = max(self.size.height - self.head_rows - 1, 1)
        self.go(self.cursor + pages * page, step=1 if pages > 0 else -1)

    def action_edge(self, side: int) -> None:
        self.go(0 if side < 0 else len(self.lines) - 1, step=-side)

    def action_choose(self) -> None:
        if self.lines:
            self.post_message(self.Chosen(self))

    def wheel(self, lines: int) -> None:
        self.action_move(lines)

    def on_click(self, event: Click) -> None:
        index = event.y - self.head_rows + self._top
        if event.y < self.head_rows or not 0 <= index < len(self.lines) or not self.selectable(index):
            return
        if index == self.cursor:
            self.action_choose()
        else:
            self.go(index)
