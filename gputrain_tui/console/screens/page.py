"""Base of the screens without a run: tabs on top, keys at the bottom."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from textual.app import ComposeResult
from textual.events import Click

from gputrain_tui.console.actions import ACTIONS
from gputrain_tui.console.screens.app_protocol import AppProtocol, LaunchSession, app_of
from gputrain_tui.console.screens.console_screen import ConsoleScreen
from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, fit_row
from gputrain_tui.console.widgets.key_bar import KeyBar


class ScreenTabs(Canvas):
    """Tabs of the four screens with their keys; a click goes to the screen."""

    DEFAULT_CSS = """
    ScreenTabs { height: 1; dock: top; background: $panel; }
    """

    ALLOW_SELECT = False

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
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
            row += [
                (f" {action.key_text} ", "key"),
                (f"{action.label} ", "title" if name == self.place else "dim"),
            ]
            at += len(action.label) + 4
        return [fit_row(row, width)]

    async def on_click(self, event: Click) -> None:
        for begin, end, name in self._click_targets:
            if begin <= event.x < end:
                event.stop()
                await self.screen.run_action(f"app.{name}")


class Page(ConsoleScreen):
    """Screen with tabs and keys; a subclass yields the body."""

    PLACE: ClassVar[str] = ""
    TAB: ClassVar[str] = ""
    """Name of the highlighted tab; empty: ``PLACE``."""

    def compose(self) -> ComposeResult:
        yield ScreenTabs(self.TAB or self.PLACE)
        yield from self.body()
        yield KeyBar(self.PLACE)

    @abstractmethod
    def body(self) -> ComposeResult:
        """Yield the widgets between tabs and keys."""

    @property
    def console(self) -> AppProtocol:
        return app_of(self)

    @property
    def session(self) -> LaunchSession:
        return self.console.session

    def action_demo(self) -> None:
        self.console.action_demo()
