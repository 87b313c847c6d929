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
from pathlib import Path
from typing import TYPE_CHECKING

from gputrain_tui.arguments import FlagParser
from trainer.contract.errors import ExitCode, RequestError, quoted

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.hostfile import HostEntry

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
    parser.add_argument(
        "--fps",
        type=_paints,
        metavar="N",
        help="repaints per second at most, 0.2 to 30; default 10; lower it on slow links",
    )


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
        RequestError: there is no terminal, or the hostfile is wrong.
    """
    hosts: tuple[HostEntry, ...] = ()
    if hostfile is not None:
        from gputrain_tui.hosts.hostfile import read_hostfile

        hosts = read_hostfile(Path(hostfile))
    before = os.environ.get(TEXTUAL_FPS)
    if fps is not None:
        os.environ[TEXTUAL_FPS] = str(math.ceil(fps))
    from gputrain_tui.console.app import GputrainApp
    from gputrain_tui.console.terminal import captured_stderr

    if before is not None:  # restored, since runs launched from here inherit the environment
        os.environ[TEXTUAL_FPS] = before
    else:
        os.environ.pop(TEXTUAL_FPS, None)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RequestError("the console needs a terminal; `gputrain --help` lists the commands that do not")
    app = GputrainApp(run, fps=fps, hosts=hosts)
    with captured_stderr():
        app.run()
    if (live := app.live) is not None and not live.over:
        advice = "`gputrain attach` shows it again, `gputrain stop` ends it"
        print(f"{live.id} has not ended: {advice}", file=sys.stderr)
    return app.return_code if app.return_code is not None else ExitCode.FINISHED
