"""What the screens without a run have in common: the line of places above, the keys below, and the console itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from textual.app import ComposeResult
from textual.screen import Screen

from gputrain_tui.console.launch_session import LaunchSession
from gputrain_tui.console.screens.console import Console, console_of
from gputrain_tui.console.widgets.abstract import Abstract
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.places import Places


class Page(Screen[None], metaclass=Abstract):
    """A screen of the console."""

    PLACE: ClassVar[str] = ""
    """What the table of actions calls it."""
    TAB: ClassVar[str] = ""
    """The place to which it belongs in the first line; by default its own."""

    def compose(self) -> ComposeResult:
        """Yield the first and the last line, and what the screen has between them."""
        yield Places(self.TAB or self.PLACE)
        yield from self.body()
        yield KeyBar(self.PLACE)

    @abstractmethod
    def body(self) -> ComposeResult:
        """Yield what stands between the first and the last line."""

    @property
    def console(self) -> Console:
        """The console."""
        return console_of(self)

    @property
    def session(self) -> LaunchSession:
        """What the screens hand to each other."""
        return self.console.session

    def action_demo(self) -> None:
        """Launch the demo."""
        self.console.action_demo()
