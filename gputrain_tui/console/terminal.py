"""The terminal beside Textual: captured standard error, tmux's clipboard, and the notice at the end of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from gputrain_tui.diagnosis.roll_up import marking_findings
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle.live_run import LiveRun
from gputrain_tui.state.finding_text import run_mark
from trainer.contract.errors import printable, printable_lines

KEPT_BYTES = 1 << 20
"""Bytes beyond which ``trim_stderr`` drops the captured text, so that a week of warnings does not fill the memory."""
BELL = "\a"


@contextmanager
def captured_stderr() -> Iterator[None]:
    """Redirect descriptor 2 to memory within the block, and show the end of the captured text afterwards.

    NVML, CUDA and other libraries write to it. Textual draws on ``sys.__stderr__``, which keeps the terminal.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    screen = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    captured = os.memfd_create("stderr")
    original = sys.__stderr__
    sys.__stderr__ = screen  # type: ignore[misc]
    os.dup2(captured, 2)
    os.set_inheritable(2, True)
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.__stderr__ = original  # type: ignore[misc]
        os.dup2(terminal, 2)
        os.set_inheritable(2, True)
        os.close(terminal)
        shown_bytes = 16 << 10  # the last ones
        written = os.pread(captured, shown_bytes, max(0, os.fstat(captured).st_size - shown_bytes))
        text = printable_lines(written.decode("utf-8", "backslashreplace"))
        os.write(2, text.encode("utf-8", "backslashreplace"))
        os.close(captured)
        screen.close()


def trim_stderr() -> None:
    """Drop the captured text if it exceeds ``KEPT_BYTES``."""
    status = os.fstat(2)
    if not os.isatty(2) and status.st_nlink == 0 and status.st_size > KEPT_BYTES:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def load_tmux_buffer(text: str) -> None:
    """Put a text into tmux's newest buffer, and by tmux into the clipboard of the terminal around it.

    By default tmux ignores OSC 52 from the programs within it.
    """
    tmux_timeout_s = 2.0  # seconds after which tmux counts as hung
    with suppress(OSError, subprocess.SubprocessError):  # OSC 52 was sent as well
        command = ["tmux", "load-buffer", "-w", "-"]
        subprocess.run(command, input=text.encode(), capture_output=True, timeout=tmux_timeout_s, check=False)


class EndNotice:
    """Writes a notice once for each run that ends while it is followed; none for a run opened after its end.

    A training takes hours, during which its terminal may be behind other windows.
    """

    def __init__(self, write: Callable[[str], object], environ: Mapping[str, str]) -> None:
        self._write = write
        self._environ = environ
        self._unended_id = ""

    def check(self, live: LiveRun) -> None:
        if not live.caught_up:
            if live.run.status.status not in ENDED:  # it may end while its record is read
                self._unended_id = live.id
        elif not live.over:
            self._unended_id = live.id
        elif self._unended_id == live.id:
            self._unended_id = ""
            text = f"{live.run.status.recipe} {'lost its supervisor' if live.status == 'lost' else live.status}"
            if condition := run_mark(marking_findings(live.state)):
                text = f"{text}, with {condition}"
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
