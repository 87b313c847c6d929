"""Tells the terminal once that the run on the screen has ended: a bell, and a notification where the terminal has them.

A training takes hours, in which its terminal lies behind other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gputrain_tui.console.live import LiveRun
from gputrain_tui.history.status_file import ENDED
from trainer.contract.errors import printable

BELL = "\a"
MAX_TEXT_CHARS = 200
"""More than a desktop's notification shows."""


class EndNotice:
    """Writes a notice for each run that was followed when it ended, and none for one that was opened afterwards."""

    def __init__(self, write: Callable[[str], object], environ: Mapping[str, str]) -> None:
        self._write = write
        self._environ = environ
        self._going = ""
        """Id of the run that was seen to go on."""

    def check(self, live: LiveRun) -> None:
        """Notify where the run has ended since the last check."""
        if not live.caught_up:
            if live.run.status.status not in ENDED:  # it may end while its past is read
                self._going = live.id
            return
        if not live.over:
            self._going = live.id
        elif self._going == live.id:
            self._going = ""
            what = f"{live.run.status.recipe} {'lost its supervisor' if live.status == 'lost' else live.status}"
            why = live.state.ended.message if live.state.ended is not None else live.message
            self._write(notice(f"{what}: {why}" if why else what, self._environ))


def notice(text: str, environ: Mapping[str, str]) -> str:
    """Return what makes a terminal notify a person: OSC 777 or OSC 9, which others pass over, and always the bell."""
    term = environ.get("TERM", "")
    if term in ("", "dumb", "linux") or "STY" in environ:  # a screen session and the Linux console would print it
        return BELL
    text = f"gputrain: {printable(text)}"[:MAX_TEXT_CHARS]
    if term.startswith(("foot", "rxvt")) or "VTE_VERSION" in environ:
        shown = f"\x1b]777;notify;gputrain;{text.removeprefix('gputrain: ').replace(';', ',')}\x1b\\"
    else:
        shown = f"\x1b]9;{text}\x1b\\"
    if "TMUX" in environ:  # which hands it on where allow-passthrough is set
        shown = f"\x1bPtmux;{shown.replace(chr(27), chr(27) * 2)}\x1b\\"
    return BELL + shown
