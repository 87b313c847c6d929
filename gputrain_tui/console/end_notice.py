"""Bell and desktop notification when the followed run ends.

A training takes hours, during which its terminal may be behind other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gputrain_tui.console.live import LiveRun
from gputrain_tui.diagnosis.roll_up import roll_up
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.state.finding_text import run_mark
from trainer.contract.errors import printable

BELL = "\a"


class EndNotice:
    """Writes a notice once for each run that ends while it is followed; none for a run opened after its end."""

    def __init__(self, write: Callable[[str], object], environ: Mapping[str, str]) -> None:
        self._write = write
        self._environ = environ
        self._unended_id = ""

    def check(self, live: LiveRun) -> None:
        if not live.caught_up:
            if live.run.status.status not in ENDED:  # it may end while its record is read
                self._unended_id = live.id
            return
        if not live.over:
            self._unended_id = live.id
        elif self._unended_id == live.id:
            self._unended_id = ""
            text = f"{live.run.status.recipe} {'lost its supervisor' if live.status == 'lost' else live.status}"
            if mark := run_mark(roll_up(live.state.findings.values(), live.state.ranks)):
                text = f"{text}, with {mark}"
            message = live.state.ended.message if live.state.ended is not None else live.message
            self._write(notice(f"{text}: {message}" if message else text, self._environ))


def notice(text: str, environ: Mapping[str, str]) -> str:
    """Return the control sequences of a notice: the bell, then OSC 777 or OSC 9, which other terminals ignore."""
    term = environ.get("TERM", "")
    if term in ("", "dumb", "linux") or "STY" in environ:  # GNU screen and the Linux console would print the text
        return BELL
    max_text_chars = 200  # most characters of a notification, more than desktops show
    text = f"gputrain: {printable(text)}"[:max_text_chars]
    if term.startswith(("foot", "rxvt")) or "VTE_VERSION" in environ:
        shown = f"\x1b]777;notify;gputrain;{text.removeprefix('gputrain: ').replace(';', ',')}\x1b\\"
    else:
        shown = f"\x1b]9;{text}\x1b\\"
    if "TMUX" in environ:  # tmux forwards the wrapped sequence if allow-passthrough is set
        shown = f"\x1bPtmux;{shown.replace(chr(27), chr(27) * 2)}\x1b\\"
    return BELL + shown
