"""Interface of the app that screens use, so that they need not import the app."""

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


class AppProtocol(Protocol):
    """Attributes and methods of the app that screens use."""

    session: LaunchSession
    """State shared for the next launch."""
    live: LiveRun | None
    """The run that was opened last."""
    supervisors: list[subprocess.Popen[bytes]]
    """Supervisors of runs launched from this console; each launch polls them, so that an ended one is no zombie."""
    quiet_s: float
    """Seconds between the last two keys."""

    def list_runs(self) -> list[Run]:
        """Return the newest runs, newest first; if their folder cannot be read, report the error and return none."""

    def report(self, text: str, *, alarm: bool = False) -> None:
        """Show a notification."""

    def copy(self, text: str, label: str) -> None:
        """Copy text to the clipboard, and name it by ``label`` in a notification."""

    async def action_go(self, name: str) -> None:
        """Go to one of the four screens."""

    def action_demo(self) -> None:
        """Launch the demo."""

    async def open_run(self, run: Run) -> None:
        """Open the run screen on a run."""

    def run_worker(self, work: WorkType[Any], *, group: str, exclusive: bool = False) -> object:
        """Run a coroutine as a Textual worker; an exclusive one cancels the others of its group."""

    def confirm(self, question: str, consequence: str, *, yes: str, act: Callable[[], object]) -> None:
        """Open a yes-or-no dialog, and call ``act`` on yes."""

    def compare_with_last(self, run: Run) -> None:
        """Open the compare screen on a run and the one before it of the same recipe."""


def app_of(screen: Screen[Any]) -> AppProtocol:
    """Return the app of a screen."""
    return cast(AppProtocol, screen.app)
