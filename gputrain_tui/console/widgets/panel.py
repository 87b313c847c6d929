"""Base of the panels on a run: redraws on a tick where the run changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.strip import Strip

from gputrain_tui.console.widgets.canvas import Canvas, role_classes
from gputrain_tui.console.widgets.drawing import Row

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun


class Panel(Canvas):
    """Canvas on a run; ``tick`` is called by the screen's clock."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(
        "axis", "victim", "under", "band", "median", "median-on-band", "rank", "rank-on-band"
    )

    DEFAULT_CSS = """
    Panel > .canvas--axis { color: $foreground 50%; }
    Panel > .canvas--victim { color: $text-error 70%; }
    Panel > .canvas--under { color: $text-secondary 70%; }
    Panel > .canvas--band { color: $primary 38%; }
    Panel > .canvas--median { color: $foreground; }
    Panel > .canvas--median-on-band { color: $foreground; background: $primary 38%; }
    Panel > .canvas--rank { color: $text-accent; }
    Panel > .canvas--rank-on-band { color: $text-accent; background: $primary 38%; }
    Panel:light > .canvas--axis { color: $foreground 60%; }
    Panel:light > .canvas--band { color: $primary 25%; }
    Panel:light > .canvas--median-on-band, Panel:light > .canvas--rank-on-band { background: $primary 25%; }
    Panel:ansi > .canvas--axis { text-style: dim; }
    Panel:ansi > .canvas--under { color: ansi_magenta; }
    Panel:ansi > .canvas--victim { color: ansi_red; text-style: dim; }
    Panel:ansi > .canvas--band { color: ansi_blue; }
    Panel:ansi > .canvas--median { text-style: bold; }
    """

    _selected_rank: int | None = None
    _seen: object = None

    def __init__(self, live: LiveRun, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.live = live

    @property
    def selected_rank(self) -> int | None:
        """The selected rank; None: none."""
        return self._selected_rank

    @selected_rank.setter
    def selected_rank(self, rank: int | None) -> None:
        if rank != self._selected_rank:
            self._selected_rank = rank
            self.redraw()

    def seen_version(self) -> object:
        """Return a value that changes when the panel must be drawn again."""
        return self.live.series.version

    def tick(self) -> None:
        """Redraw if ``seen_version`` changed."""
        if self.display and self.size and self.seen_version() != self._seen:
            self.redraw()

    def strip(self, row: Row, width: int) -> Strip:
        """Return a row, which panels draw in exactly ``width`` cells: measuring it would take a tenth of a repaint."""
        return Strip(self.segments(row), width)

    def redraw(self) -> None:
        """Draw again and repaint the lines that differ."""
        self._seen = self.seen_version()
        super().redraw()


class ClockPanel(Panel):
    """Panel that changes with every event, and with the seconds of a run that goes on."""

    def seen_version(self) -> object:
        """Change with events and seconds."""
        return self.live.version, int(self.live.elapsed_s or 0)
