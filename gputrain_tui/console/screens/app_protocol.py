"""What screens share: the interface of the app, which they need not import, and the state of the next launch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from textual.screen import Screen
from textual.worker import WorkType

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.hostfile import HostEntry
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
    hostfile: str = ""
    """Path of the hostfile; empty: none."""

    @property
    def unsaved(self) -> list[str]:
        return [draft.name for draft in self.drafts.values() if draft.changes]


class AppProtocol(Protocol):
    """Attributes and methods of the app that screens use."""

    session: LaunchSession
    live: LiveRun | None
    supervisors: list[subprocess.Popen[bytes]]
    """Supervisors of runs launched from this console; each launch polls them, so that an ended one is no zombie."""
    quiet_s: float

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
