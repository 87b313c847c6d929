"""Interface of the app for its screens, which so need not import it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from textual.screen import Screen
from textual.worker import WorkType

if TYPE_CHECKING:
    from gputrain_tui.console.launch_session import LaunchSession
    from gputrain_tui.console.live import LiveRun
    from gputrain_tui.history.runs import Run
    from gputrain_tui.lifecycle.warm_pool import WarmPool


class AppProtocol(Protocol):
    """The app, as its screens see it."""

    session: LaunchSession
    """State shared for the next launch."""
    live: LiveRun | None
    """The run that was opened last."""
    warm: WarmPool | None
    """Processes that have torch loaded; None: without them."""
    supervisors: list[subprocess.Popen[bytes]]
    """Of the runs launched here; asked now and then whether they have ended, so that none stays a zombie."""
    quiet_s: float
    """Seconds between the last two keys."""

    def report(self, text: str, *, alarm: bool = False) -> None:
        """Show a notification."""

    def copy(self, text: str, what: str) -> None:
        """Copy text to the clipboard, and report what it was."""

    async def action_go(self, name: str) -> None:
        """Go to one of the four screens."""

    def action_demo(self) -> None:
        """Launch the demo."""

    async def open_run(self, run: Run) -> None:
        """Show a run from its beginning on."""

    def run_worker(self, work: WorkType[Any], *, group: str, exclusive: bool = False) -> object:
        """Run a coroutine beside the app; an exclusive one ends the others of its group."""

    def confirm(self, question: str, consequence: str, *, yes: str, act: Callable[[], object]) -> None:
        """Act once the person has confirmed it."""

    def compare_with_last(self, run: Run) -> None:
        """Compare a run with the one before it of the same recipe."""


def app_of(screen: Screen[Any]) -> AppProtocol:
    """Return the app of a screen."""
    return cast(AppProtocol, screen.app)
