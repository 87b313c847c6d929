"""``gputrain stop``: stops a run everywhere and says what is left of it: nothing."""

from __future__ import annotations

import os
import select
import signal
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress

from gputrain_tui.plan import stop_grace
from gputrain_tui.running import outcome, start
from gputrain_tui.running.leftovers import end, processes_of
from gputrain_tui.running.processes import ProcessIdentity, is_alive
from gputrain_tui.runs import ENDED, Run, find, open_run, read_plan
from gputrain_tui.tables import printable
from trainer.errors import ExitCode, RecordError, RequestError
from trainer.outcome import SAVE_S
from trainer.record import MOST_RANKS, RunDir

NAME = "stop"
HELP = "stop a run everywhere and say what is left of it"

PATIENCE_S = 5.0
"""How long the supervisor may take beyond what it gives the ranks, and after being told not to wait for them."""


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
        print(f"the supervisor of {printable(found.id)} was killed; taking over", file=sys.stderr)
    report, left = stop(found)
    print(printable(report))
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
        _stop(supervisor, found.dir)
    left = end(found.dir.path) if processes_of(found.dir.path) else []
    ended = open_run(found.dir.path) or found
    return _report(found, ended, left), left


def _report(before: Run, after: Run, left: list[int]) -> str:
    if before.state in ENDED:
        how = f"was {after.state} already"
    else:
        kept = outcome.kept(after.dir, _nodes(after.dir)) if after.state == "stopped" else ""
        how = f"is {after.state}" + (kept and f" {kept}")
    return f"{after.id} {how}; processes left: {', '.join(map(str, left)) or 'none'}"


def _nodes(run_dir: RunDir) -> list[int]:
    numbers = (int(path.stem) for path in run_dir.nodes.glob("*.json") if path.stem.isdecimal())
    return sorted(number for number in numbers if number < MOST_RANKS)


def _patience_s(run_dir: RunDir) -> float:
    """How long a run may take to stop in order: its ranks answer, save and leave."""
    try:
        plan = read_plan(run_dir)
    except RecordError:
        return PATIENCE_S
    return max(stop_grace(node.argv) for node in plan.nodes) + SAVE_S + 2 * PATIENCE_S


def _stop(supervisor: ProcessIdentity, run_dir: RunDir) -> None:
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
        for number, patience in ((signal.SIGTERM, _patience_s(run_dir)), (signal.SIGTERM, PATIENCE_S)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if waiter.poll(patience * 1000):
                return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        waiter.poll(PATIENCE_S * 1000)
    finally:
        os.close(handle)
