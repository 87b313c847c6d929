"""Bases of the console's screens, what they use of the app, and the state of the next launch that they share."""

from __future__ import annotations

import subprocess
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

from textual.app import ComposeResult
from textual.errors import NoWidget
from textual.events import Click, Key, MouseDown, MouseUp, Resize
from textual.geometry import Offset
from textual.screen import Screen
from textual.selection import Selection
from textual.timer import Timer
from textual.widget import Widget
from textual.worker import WorkType

from gputrain_tui.console.actions import ACTIONS, bindings
from gputrain_tui.console.textual_internals import AbstractWidgetMeta
from gputrain_tui.console.widgets.canvas import Canvas, Copyable
from gputrain_tui.console.widgets.drawing import Row, fit_row
from gputrain_tui.console.widgets.key_bar import KeyBar

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.hostfile import HostEntry
    from gputrain_tui.lifecycle.live_run import LiveRun
    from gputrain_tui.recipe.draft import Draft
    from gputrain_tui.recipe.model import Recipe


@dataclass
class LaunchSession:
    """State of the next launch; one per console."""

    folder: Path = field(default_factory=Path.cwd)
    drafts: dict[Path, Draft] = field(default_factory=dict)
    source: str | None = None
    """Recipe file that the launch screen opens when it is shown next."""
    wants_new: bool = False
    """Whether the launch screen asks for a new recipe when it is shown next."""
    recipe: Recipe | None = None
    """Recipe in the form; None if it is invalid or none is open."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs chosen for the next launch that are not in the form yet, by host; ``localhost`` is this machine."""
    hosts: tuple[HostEntry, ...] = ()


class AppProtocol(Protocol):
    """What screens use of the app, which imports them; the methods are described in ``app.py``."""

    session: LaunchSession
    live: LiveRun | None
    supervisors: list[subprocess.Popen[bytes]]
    quiet_s: float

    def list_runs(self) -> list[Run]: ...
    def report(self, text: str, *, alarm: bool = False) -> None: ...
    def copy(self, text: str, label: str) -> None: ...
    async def action_go(self, name: str) -> None: ...
    async def open_run(self, run: Run) -> None: ...
    def run_worker(self, work: WorkType[Any], *, group: str, exclusive: bool = False) -> object: ...
    def confirm(self, question: str, consequence: str, *, yes: str, act: Callable[[], object]) -> None: ...


T = TypeVar("T")
SELECTION_S = 15.0
"""Seconds after which a selection ends by itself: a panel with selected text is not redrawn, and an accidental click
must not leave it with old values for long."""


def next_of(values: Sequence[T], value: T) -> T:
    """Return the value after one of ``values``, after the last one the first."""
    return values[(values.index(value) + 1) % len(values)]


class ConsoleScreen(Screen[None], metaclass=AbstractWidgetMeta):
    """Screen with panels of text that can be selected and copied, each selection within one panel."""

    PLACE: ClassVar[str] = ""
    """Name of the screen in the action table."""
    _pressed: Canvas | None = None
    """The panel in which the mouse button was pressed, and to which a selection is confined."""
    _selection_timer: Timer | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Bind the keys of the screen's actions."""
        if place := cls.__dict__.get("PLACE"):
            cls.BINDINGS = [*bindings(place), *cls.__dict__.get("BINDINGS", ())]
        super().__init_subclass__(**arguments)

    @property
    def console(self) -> AppProtocol:
        return cast(AppProtocol, self.app)

    # Selection

    def on_mouse_down(self, event: MouseDown) -> None:
        """Confine a selection to the panel in which it begins."""
        self._pressed = None
        widget, _ = self.get_widget_and_offset_at(*event.screen_offset)
        self._pressed = widget if isinstance(widget, Canvas) else None

    def on_mouse_up(self, event: MouseUp) -> None:
        self._pressed = None

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """Return the widget at a cell, and the offset in its text; a panel computes the offset itself."""
        try:
            widget = self._pressed if self._pressed is not None else self.get_widget_at(x, y)[0]
        except NoWidget:
            return None, None
        if not isinstance(widget, Canvas):
            return super().get_widget_and_offset_at(x, y)
        corner = widget.content_region.offset
        if self._pressed is None and not widget.is_text_at(y - corner.y):
            return None, None
        return widget, widget.text_offset(x - corner.x, y - corner.y)

    def watch_selections(self, selections: dict[Widget, Selection]) -> None:
        """Show the keys of a selection in the footer while there is one; end it after ``SELECTION_S``."""
        if self._selection_timer is not None:
            self._selection_timer.stop()
        self._selection_timer = self.set_timer(SELECTION_S, self.clear_selection) if selections else None
        for keys in self.query(KeyBar):
            keys.redraw()

    def key_escape(self, event: Key) -> None:
        """End a selection; the screen's own Escape does not run then."""
        if self.selections:
            event.stop()
            self.clear_selection()

    def on_resize(self, event: Resize) -> None:
        """End a selection: its lines have moved."""
        self.clear_selection()

    # Copy

    def action_copy_text(self) -> None:
        super().action_copy_text()
        self.clear_selection()

    def action_copy(self) -> None:
        """Copy the selection; else ``copyable`` of the focused panel; else ``copyable`` of the screen."""
        if self.selections:
            self.action_copy_text()
            return
        focused = self.focused.copyable() if isinstance(self.focused, Canvas) else None
        if (copyable := focused or self.copyable()) is None:
            self.console.report("nothing to copy here; text that is selected with the mouse is copied by ctrl+c")
        else:
            self.console.copy(copyable.text, copyable.label)

    def copyable(self) -> Copyable | None:
        """Return the text for the copy key if the focused panel has none; None: nothing to copy."""
        return None


class ScreenTabs(Canvas):
    """Tabs of the four screens with their keys; a click goes to the screen."""

    DEFAULT_CSS = """
    ScreenTabs { height: 1; dock: top; background: $panel; }
    """

    ALLOW_SELECT = False

    def __init__(self, current: str) -> None:
        super().__init__()
        self._current = current
        self._click_targets: list[tuple[int, int, str]] = []

    def draw(self, width: int, height: int) -> list[Row]:
        row: Row = [(" gputrain  ", "title")]
        self._click_targets = []
        at = 11
        for action in ACTIONS:
            if not action.name.startswith("go("):
                continue
            name = action.name.removeprefix("go('").removesuffix("')")
            self._click_targets.append((at, at + len(action.label) + 3, action.name))
            role = "title" if name == self._current else "dim"
            row += [(f" {action.key_text} ", "key"), (f"{action.label} ", role)]
            at += len(action.label) + 4
        return [fit_row(row, width)]

    async def on_click(self, event: Click) -> None:
        for begin, end, name in self._click_targets:
            if begin <= event.x < end:
                event.stop()
                await self.screen.run_action(f"app.{name}")


class Page(ConsoleScreen):
    """Screen with tabs and keys; a subclass yields the body."""

    TAB: ClassVar[str] = ""
    """Name of the highlighted tab; empty: ``PLACE``."""

    def compose(self) -> ComposeResult:
        yield ScreenTabs(self.TAB or self.PLACE)
        yield from self.body()
        yield KeyBar(self.PLACE, lacking=self.lacking)

    def lacking(self) -> Collection[str]:
        """Return the actions that cannot be done now, which the footer leaves out."""
        return ()

    @abstractmethod
    def body(self) -> ComposeResult:
        """Yield the widgets between tabs and keys."""

    @property
    def session(self) -> LaunchSession:
        return self.console.session
