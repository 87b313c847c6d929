"""Base of the screens without a run: tabs on top, keys at the bottom."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from textual.app import ComposeResult

from gputrain_tui.console.launch_session import LaunchSession
from gputrain_tui.console.screens.app_protocol import AppProtocol, app_of
from gputrain_tui.console.screens.console_screen import ConsoleScreen
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.screen_tabs import ScreenTabs


class Page(ConsoleScreen):
    """Screen with tabs and keys; a subclass yields the body."""

    PLACE: ClassVar[str] = ""
    """Name of the screen in the action table."""
    TAB: ClassVar[str] = ""
    """Name of the highlighted tab; empty: ``PLACE``."""

    def compose(self) -> ComposeResult:
        """Yield the tabs, the body and the keys."""
        yield ScreenTabs(self.TAB or self.PLACE)
        yield from self.body()
        yield KeyBar(self.PLACE)

    @abstractmethod
    def body(self) -> ComposeResult:
        """Yield the widgets between tabs and keys."""

    @property
    def console(self) -> AppProtocol:
        """The app."""
        return app_of(self)

    @property
    def session(self) -> LaunchSession:
        """State shared for the next launch."""
        return self.console.session

    def action_demo(self) -> None:
        """Launch the demo."""
        self.console.action_demo()
