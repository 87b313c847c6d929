"""Entry point of the console: parses its flags, and sets Textual's frame rate before importing it.

Textual reads its frame rate once, at its import. Slowing only the console's clock would leave repaints for keys,
scrolling and a blinking cursor at full speed.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gputrain_tui.arguments import FlagParser
from gputrain_tui.output import log_line
from trainer.contract.errors import ExitCode, RequestError, listed, printable, quoted

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.hostfile import HostEntry
    from gputrain_tui.lifecycle.live_run import LiveRun

TEXTUAL_FPS = "TEXTUAL_FPS"
"""Environment variable of Textual's frame rate, a whole number of repaints per second."""


def main(argv: Sequence[str] = ()) -> int:
    """Show the console until the user leaves; return the exit code."""
    parser = FlagParser()
    add_fps(parser)
    parser.add_argument("--hostfile", metavar="FILE")
    args = parser.parse_argv(argv)
    return show(None, fps=args.fps, hostfile=args.hostfile)


def add_fps(parser: ArgumentParser) -> None:
    """Add ``--fps``."""
    text = "repaints per second at most, 0.2 to 30; default 10; lower it on slow links"
    parser.add_argument("--fps", type=_paints, metavar="N", help=text)


def _paints(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 30:
        raise ArgumentTypeError(f"{quoted(text)} is not a number from 0.2 to 30")
    return value


def show(run: Run | None, *, fps: float | None, hostfile: str | None = None) -> int:
    """Show the console on a run, or on all of them; return the exit code.

    ``run`` is opened at once; ``fps``: most repaints a second, whatever causes them, None: the console's default, and
    at once after keys; ``hostfile``: file that names hosts to show besides this machine.

    Raises:
        RequestError: there is no terminal that can show it, or the hostfile is wrong.
    """
    hosts: tuple[HostEntry, ...] = ()
    if hostfile is not None:
        from gputrain_tui.hosts.hostfile import read_hostfile

        hosts = read_hostfile(Path(hostfile))
    _require_terminal()
    before = os.environ.get(TEXTUAL_FPS)
    if fps is not None:
        os.environ[TEXTUAL_FPS] = str(math.ceil(fps))
    from gputrain_tui.console.app import GputrainApp
    from gputrain_tui.console.terminal import captured_stderr

    if before is not None:  # restored, since runs launched from here inherit the environment
        os.environ[TEXTUAL_FPS] = before
    else:
        os.environ.pop(TEXTUAL_FPS, None)
    app = GputrainApp(run, fps=fps, hosts=hosts)
    with captured_stderr():
        app.run()
    if names := _going(app.live):
        log_line(going_on(names))
    return app.return_code if app.return_code is not None else ExitCode.FINISHED


def _require_terminal() -> None:
    is_dumb = os.environ.get("TERM") == "dumb"
    if is_dumb or not (sys.stdin.isatty() and sys.stdout.isatty()):
        needed = "a terminal that it can draw on, not TERM=dumb" if is_dumb else "a terminal"
        others = "`gputrain run RECIPE`, `gputrain runs` and `gputrain report RUN` print lines"
        raise RequestError(f"the console needs {needed}; {others}, `gputrain --help` lists all commands")


def _going(live: LiveRun | None) -> list[str]:
    """Return the newest runs that have not ended, by name, and the one on the screen by its path if it is elsewhere."""
    from gputrain_tui.history.run_folders import list_runs
    from gputrain_tui.history.status_file import ENDED
    from gputrain_tui.shell_words import shell_quoted

    runs: list[Run] = []
    with suppress(RequestError):  # their folder cannot be read
        runs = list_runs()
    names = [run.id for run in runs if run.state not in (*ENDED, "lost")]
    if live is not None and not live.over and live.id not in names:
        names.append(shell_quoted(str(live.run.dir.path)))
    return names


def going_on(names: Sequence[str]) -> str:
    """Return the line about the runs that go on after the console is closed, with the commands for them."""
    run = names[0] if len(names) == 1 else "RUN"
    count = "1 run goes on" if len(names) == 1 else f"{len(names):,} runs go on"
    return printable(f"{count}: {listed(names, most=3)} (`gputrain attach {run}`, `gputrain stop {run}`)")
