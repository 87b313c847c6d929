"""Starts the supervisor of a run as a process of its own, and waits until it has taken over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import ENDED, read_status
from gputrain_tui.hosts.open_connections import CONNECTIONS
from gputrain_tui.lifecycle.leftovers import SUPERVISOR
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.host.process_identity import ProcessIdentity
from trainer.host.processes import RUN
from trainer.host.stop_request import STOP_SIGNALS

if TYPE_CHECKING:
    from gputrain_tui.hosts.open_connections import OpenConnections


def start_supervisor(
    run_dir: RunDir,
    *,
    leased: bool,
    adopting: bool = False,
    connections: OpenConnections | None = None,
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a run.

    Args:
        run_dir: run directory.
        leased: whether closing the supervisor's standard input, a pipe, ends the run.
        adopting: whether it takes over the run of a supervisor that was killed.
        connections: connections to the hosts of the run, which the supervisor takes over.
    """
    argv = [str(run_dir.path), *(["--lease"] if leased else []), *(["--adopt"] if adopting else [])]
    by_node = {} if connections is None else connections.by_node
    if by_node:
        argv.append(f"{CONNECTIONS}{msgspec.json.encode(by_node).decode()}")
    # The supervisor inherits the signal mask and unblocks the signals once it has handlers: a Ctrl-C while its modules
    # load stays pending.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with _supervisor_log(run_dir) as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.supervisor", *argv],
                env={**_outside_of_runs(os.environ), SUPERVISOR: str(run_dir.path.absolute())},
                stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[descriptor for opened in by_node.values() for descriptor in opened.descriptors],
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if connections is not None:
        connections.hand_over()
    return supervisor


def _outside_of_runs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the mark of the run whose script has started this command, which ends with it."""
    return {name: value for name, value in environ.items() if name != RUN}


def _supervisor_log(run_dir: RunDir) -> IO[bytes]:
    """Open the supervisor's log; the null device if the log cannot be opened, so that the run starts all the same."""
    try:
        return os.fdopen(open_to_append(run_dir.logs / "supervisor.log"), "ab")
    except OSError:
        return Path(os.devnull).open("ab")


def adopt(run: Run) -> Run:
    """Start a new supervisor for a run whose supervisor was killed; return once it has taken over or ended the run.

    Raises:
        RequestError: the new supervisor did not start.
    """
    status = read_status(run.dir) or run.status
    supervisor = start_supervisor(run.dir, leased=False, adopting=True)
    await_supervisor(run, supervisor, previous=status.supervisor)
    return open_run(run.dir.path) or run


def await_supervisor(
    run: Run, supervisor: subprocess.Popen[bytes], *, previous: ProcessIdentity | None, patience_s: float = 30.0
) -> None:
    """Wait until a new supervisor is in the status of its run, which other commands take for lost until then.

    Args:
        run: the run.
        supervisor: the new supervisor.
        previous: the supervisor before, as in the status.
        patience_s: time limit.

    Raises:
        RequestError: the new supervisor did not start.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        status = read_status(run.dir)
        if status is not None and (status.supervisor != previous or status.status in ENDED):
            return
        try:
            supervisor.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        break
    status = read_status(run.dir)
    if status is None or (status.supervisor == previous and status.status not in ENDED):
        raise RequestError(f"the supervisor of {run.id} did not start; see {run.dir.logs / 'supervisor.log'}")
