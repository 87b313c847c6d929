"""Bases of panels: those of a run, which a tick redraws if the run changed, and those of scrolled text."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType
from textual.strip import Strip

from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Canvas, role_classes
from gputrain_tui.console.widgets.drawing import Row

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun


class Panel(Canvas):
    """Canvas of a run; the screen's clock calls ``tick``."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(
        "axis", "victim", "under", "band", "middle", "middle-on-band", "rank", "rank-on-band"
    )

    DEFAULT_CSS = """
    Panel > .canvas--axis { color: $foreground 50%; }
    Panel > .canvas--victim { color: $text-error 70%; }
    Panel > .canvas--under { color: $text-secondary 70%; }
    Panel > .canvas--band { color: $primary 38%; }
    Panel > .canvas--middle { color: $foreground; }
    Panel > .canvas--middle-on-band { color: $foreground; background: $primary 38%; }
    Panel > .canvas--rank { color: $text-accent; }
    Panel > .canvas--rank-on-band { color: $text-accent; background: $primary 38%; }
    Panel:light > .canvas--axis { color: $foreground 60%; }
    Panel:light > .canvas--band { color: $primary 25%; }
    Panel:light > .canvas--middle-on-band, Panel:light > .canvas--rank-on-band { background: $primary 25%; }
    Panel:ansi > .canvas--axis { text-style: dim; }
    Panel:ansi > .canvas--under { color: ansi_magenta; }
    Panel:ansi > .canvas--victim { color: ansi_red; text-style: dim; }
    Panel:ansi > .canvas--band { color: ansi_blue; }
    Panel:ansi > .canvas--middle { text-style: bold; }
    """

    _selected_rank: int | None = None
    _drawn_version: object = None

    def __init__(self, live: LiveRun, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.live = live

    @property
    def selected_rank(self) -> int | None:
        return self._selected_rank

    @selected_rank.setter
    def selected_rank(self, rank: int | None) -> None:
        if rank != self._selected_rank:
            self._selected_rank = rank
            self.redraw()

    @property
    def stands_still(self) -> bool:
        """Whether no step has come for long."""
        still = self.live.standstill
        return still is not None and still.is_long

    def seen_version(self) -> object:
        """Return a value that changes when the panel must be drawn again."""
        return self.live.series.version

    def tick(self) -> None:
        """Redraw a visible panel if ``seen_version`` changed."""
        if self.display and self.size and self.seen_version() != self._drawn_version:
            self.redraw()

    def strip(self, row: Row, width: int) -> Strip:
        """Return a row without measuring it, which takes a tenth of a repaint: panels draw exactly ``width`` cells."""
        return Strip(self.segments(row), width)

    def redraw(self) -> None:
        self._drawn_version = self.seen_version()
        super().redraw()


class ClockPanel(Panel):
    """Panel that is redrawn with every event, and every second while the run goes on."""

    def seen_version(self) -> object:
        return self.live.version, int(self.live.elapsed_s or 0)


class ScrolledText(Canvas, can_focus=True):
    """Text without a cursor, scrolled by keys and the wheel."""

    BINDINGS: ClassVar[list[BindingType]] = [*SCROLL_KEYS]

    _top = 0

    def in_view(self, rows: list[Row], height: int) -> list[Row]:
        """Return the ``height`` rows to which the text is scrolled."""
        self._top = min(self._top, max(len(rows) - height, 0))
        return rows[self._top : self._top + max(height, 0)]

    def action_scroll_by(self, lines: int) -> None:
        self._top = max(self._top + lines, 0)
        self.redraw()

    def action_edge(self, side: int) -> None:
        self.action_scroll_by(side << 20)  # more lines than any text has

    def wheel(self, lines: int) -> None:
        self.action_scroll_by(lines)
