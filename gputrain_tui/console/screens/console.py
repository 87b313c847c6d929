"""What a screen may ask of the console around it: the app knows its screens, and they know no more of it than this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from textual.screen import Screen

if TYPE_CHECKING:
    from gputrain_tui.console.launch_session import LaunchSession
    from gputrain_tui.console.live import LiveRun
    from gputrain_tui.history.runs import Run
    from gputrain_tui.lifecycle.start import Prepared
    from gputrain_tui.lifecycle.warm_pool import WarmPool


class Console(Protocol):
    """The console, as its screens see it."""

    session: LaunchSession
    """What the screens hand to each other."""
    live: LiveRun | None
    """The run that was opened last."""
    warm: WarmPool | None
    """What waits for a launch."""
    quiet_s: float
    """How long there was no key before the last one, s."""

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Tell something that goes away by itself."""

    async def action_go(self, name: str) -> None:
        """Go to one of the four screens."""

    def action_demo(self) -> None:
        """Launch the demo."""

    async def open_run(self, run: Run) -> None:
        """Show a run from its beginning on."""

    async def launch(self, prepared: Prepared) -> None:
        """Start a prepared run, detached, and show it."""

    def ask_to_stop(self, run: Run) -> None:
        """Stop a run everywhere, once the person has confirmed it."""


def console_of(screen: Screen[Any]) -> Console:
    """Return the console around a screen."""
    return cast(Console, screen.app)
