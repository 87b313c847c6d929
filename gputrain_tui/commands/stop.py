"""``gputrain stop``: stops a run everywhere and says what is left of it: nothing."""

from __future__ import annotations

import os
import select
import signal
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress

from gputrain_tui import start
from gputrain_tui.leftovers import end, processes_of
from gputrain_tui.processes import ProcessIdentity, is_alive
from gputrain_tui.runs import ENDED, Run, find, open_run
from trainer.errors import ExitCode, RequestError

NAME = "stop"
HELP = "stop a run everywhere and say what is left of it"

PATIENCE_MS = (12_000, 5_000)
"""How long the supervisor may take after being asked, and after being told not to wait for those that hang."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("run", metavar="RUN", help="run id, a unique prefix of one, or `last`")


def run(args: Namespace) -> int:
    """Stop the run and wait until it has ended.

    Raises:
        RequestError: the run belongs to another machine.
    """
    found = find(args.run)
    if found.state == "lost":
        print(f"the supervisor of {found.id} was killed; taking over", file=sys.stderr)
    report, left = stop(found)
    print(report)
    return ExitCode.FAILED if left else ExitCode.FINISHED


def stop(found: Run) -> tuple[str, list[int]]:
    """Stop a run everywhere; return what became of it in one line, and the processes that would not go.

    Raises:
        RequestError: the run belongs to another machine.
    """
    if found.state == "lost":
        found = start.adopt(found)
    supervisor = found.status.supervisor
    if found.state not in ENDED and supervisor is not None:
        if is_alive(supervisor) is None:
            raise RequestError(f"stop: {found.id} runs on {supervisor.host}; stop it there")
        _stop(supervisor)
    left = end(found.dir.path) if processes_of(found.dir.path) else []
    ended = open_run(found.dir.path) or found
    return _report(found, ended, left), left


def _report(before: Run, after: Run, left: list[int]) -> str:
    how = f"was {after.state} already" if before.state in ENDED else f"is {after.state}"
    return f"{after.id} {how}; processes left: {', '.join(map(str, left)) or 'none'}"


def _stop(supervisor: ProcessIdentity) -> None:
    """Ask the supervisor twice, then kill it; the ranks of a run die with their nodes' parents."""
    try:
        handle = os.pidfd_open(supervisor.pid)
    except ProcessLookupError:
        return
    waiter = select.poll()
    waiter.register(handle, select.POLLIN)
    try:
        if not is_alive(supervisor):  # asked after it was opened: the descriptor means this very process
            return
        for number, patience in zip((signal.SIGTERM, signal.SIGTERM), PATIENCE_MS, strict=True):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if waiter.poll(patience):
                return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        waiter.poll(PATIENCE_MS[-1])
    finally:
        os.close(handle)
