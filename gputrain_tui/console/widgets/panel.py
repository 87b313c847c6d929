"""Base of the panels on a run: repaints on a tick, only the lines that changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from gputrain_tui.console.ramp import PHASE_COLOURS, Ramp, pair, ramp_for
from gputrain_tui.console.widgets.abstract_widget import AbstractWidgetMeta
from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.history.series import Series
from gputrain_tui.state import RunState


class RunData(Protocol):
    """Interface of a followed run for its panels."""

    @property
    def state(self) -> RunState:
        """State of the run."""

    @property
    def series(self) -> Series:
        """The curves of the run."""

    @property
    def version(self) -> int:
        """Changes with everything that is shown."""


class Panel(Widget, metaclass=AbstractWidgetMeta):
    """Draws rows of (text, role) for its size; ``tick`` is called by the screen's clock."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "panel--title",
        "panel--bright",
        "panel--dim",
        "panel--rule",
        "panel--axis",
        "panel--accent",
        "panel--warning",
        "panel--error",
        "panel--victim",
        "panel--band",
        "panel--median",
        "panel--median-on-band",
        "panel--rank",
        "panel--rank-on-band",
    }

    DEFAULT_CSS = """
    Panel {
        height: 1fr;
        width: 1fr;
    }
    Panel > .panel--title { color: $foreground; text-style: bold; }
    Panel > .panel--bright { color: $foreground; }
    Panel > .panel--dim { color: $foreground 60%; }
    Panel > .panel--rule { color: $foreground 20%; }
    Panel > .panel--axis { color: $foreground 50%; }
    Panel > .panel--accent { color: $text-accent; }
    Panel > .panel--warning { color: $text-warning; }
    Panel > .panel--error { color: $text-error; text-style: bold; }
    Panel > .panel--victim { color: $text-error 70%; }
    Panel > .panel--band { color: $primary 38%; }
    Panel > .panel--median { color: $foreground; }
    Panel > .panel--median-on-band { color: $foreground; background: $primary 38%; }
    Panel > .panel--rank { color: $text-accent; }
    Panel > .panel--rank-on-band { color: $text-accent; background: $primary 38%; }
    Panel:light > .panel--dim { color: $foreground 70%; }
    Panel:light > .panel--axis { color: $foreground 60%; }
    Panel:light > .panel--band { color: $primary 25%; }
    Panel:light > .panel--median-on-band, Panel:light > .panel--rank-on-band { background: $primary 25%; }
    Panel:nocolor > .panel--error { color: $foreground; }
    Panel:ansi > .panel--dim, Panel:ansi > .panel--axis { text-style: dim; }
    Panel:ansi > .panel--rule { color: ansi_bright_black; }
    Panel:ansi > .panel--victim { color: ansi_red; text-style: dim; }
    Panel:ansi > .panel--band { color: ansi_blue; }
    Panel:ansi > .panel--median { text-style: bold; }
    """

    def __init__(self, live: RunData, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.live = live
        self._selected_rank: int | None = None
        self._seen: object = None
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._drawn_size: Size | None = None
        self._styles: dict[str, Style] = {}

    @property
    def selected_rank(self) -> int | None:
        """The selected rank; None: none."""
        return self._selected_rank

    @selected_rank.setter
    def selected_rank(self, rank: int | None) -> None:
        if rank != self._selected_rank:
            self._selected_rank = rank
            self.redraw()

    @abstractmethod
    def draw(self, width: int, height: int, ramp: Ramp) -> list[Row]:
        """Return ``height`` rows of ``width`` cells."""

    def seen_version(self) -> object:
        """Return a value that changes when the panel must be drawn again."""
        return self.live.series.version

    def tick(self) -> None:
        """Redraw if ``seen_version`` changed."""
        if self.display and self.size and self.seen_version() != self._seen:
            self.redraw()

    def redraw(self) -> None:
        """Draw again and repaint the lines that differ."""
        self._seen = self.seen_version()
        if self.size != self._drawn_size:
            self.refresh()
            return
        changed = self._draw()
        if changed:
            width = self.size.width
            self.refresh(*(Region(0, begin, width, end - begin) for begin, end in _consecutive(changed)))

    def notify_style_update(self) -> None:
        """Forget the colours of the former theme."""
        super().notify_style_update()
        self._styles.clear()
        self._rows.clear()
        self._drawn_size = None

    def render_line(self, y: int) -> Strip:
        """Return one line of the panel."""
        if self.size != self._drawn_size:
            self._drawn_size = self.size
            self._rows.clear()
            self._draw()
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)

    def _draw(self) -> list[int]:
        """Draw all rows and return the lines that differ from before."""
        width, height = self.size
        ramp = ramp_for(self.app)
        rows = self.draw(width, height, ramp)
        before, self._rows = self._rows, rows
        if len(before) != len(rows):
            self._strips = [self._strip(row, width, ramp) for row in rows]
            return list(range(len(rows)))
        changed = [y for y, row in enumerate(rows) if row != before[y]]
        for y in changed:
            self._strips[y] = self._strip(rows[y], width, ramp)
        return changed

    def _strip(self, row: Row, width: int, ramp: Ramp) -> Strip:
        styles = self._styles
        segments = []
        for text, role in row:
            style = styles.get(role)
            if style is None:
                style = styles[role] = self._style(role, ramp)
            segments.append(Segment(text, style))
        return Strip(segments, width)

    def _style(self, role: str, ramp: Ramp) -> Style:
        """Return the colours of a role: of the theme, or ``heat:3:7``, ``phase:data:sync`` of the ramp."""
        kind, _, rest = role.partition(":")
        if kind == "heat":
            top, _, bottom = rest.partition(":")
            style = pair(ramp.heat[int(top)], ramp.heat[int(bottom)] if bottom else None)
        elif kind == "phase":
            front, _, back = rest.partition(":")
            style = pair(
                ramp.phases[PHASE_COLOURS.index(front)], ramp.phases[PHASE_COLOURS.index(back)] if back else None
            )
        elif role == "base":
            return self.rich_style
        elif role == "band-reversed":
            return self.get_component_rich_style("panel--band") + Style(reverse=True)
        else:
            return self.get_component_rich_style(f"panel--{role}")
        return self.rich_style + style


def _consecutive(lines: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each run of consecutive numbers."""
    begin = before = lines[0]
    for line in lines[1:]:
        if line != before + 1:
            yield begin, before + 1
            begin = line
        before = line
    yield begin, before + 1
