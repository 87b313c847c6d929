"""Starts the supervisor of a run as a process of its own, and waits until it has taken over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import ENDED, read_status
from gputrain_tui.hosts.host_names import CHANNELS
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.host.process_identity import ProcessIdentity
from trainer.host.processes import RUN, SUPERVISOR
from trainer.host.stop_request import STOP_SIGNALS, signals_blocked

if TYPE_CHECKING:
    from gputrain_tui.hosts.host_channel import HostChannel


def start_supervisor(
    run_dir: RunDir, *, leased: bool, adopting: bool = False, channels: Sequence[HostChannel] = ()
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a run; closing the standard input, a pipe, of the one of a leased run ends the run."""
    argv = [str(run_dir.path), *(["--lease"] if leased else []), *(["--adopt"] if adopting else [])]
    if channels:
        inherited = [(channel.host, channel.mark, channel.pipes.descriptors) for channel in channels]
        argv.append(f"{CHANNELS}{msgspec.json.encode(inherited).decode()}")
    # Without the variable of the run whose script has started this command, and with which its processes end.
    outside_of_runs = {name: value for name, value in os.environ.items() if name != RUN}
    # The supervisor inherits the signal mask and unblocks the signals once it has handlers: a Ctrl-C while its modules
    # load stays pending.
    with signals_blocked(STOP_SIGNALS), _supervisor_log(run_dir) as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.supervisor", *argv],
            env={**outside_of_runs, SUPERVISOR: str(run_dir.path.absolute())},
            stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[descriptor for channel in channels for descriptor in channel.pipes.descriptors],
        )
    for channel in channels:
        channel.pipes.detach()
    return supervisor


def _supervisor_log(run_dir: RunDir) -> IO[bytes]:
    """Open the supervisor's log; the null device if the log cannot be opened, so that the run starts all the same."""
    try:
        return os.fdopen(open_to_append(run_dir.logs / "supervisor.log"), "ab")
    except OSError:
        return Path(os.devnull).open("ab")


def adopt(run: Run) -> Run:
    """Start a new supervisor for a run whose supervisor was killed; return once it has taken over or ended the run."""
    status = read_status(run.dir) or run.status
    supervisor = start_supervisor(run.dir, leased=False, adopting=True)
    await_supervisor(run, supervisor, previous=status.supervisor)
    return open_run(run.dir.path) or run


def await_supervisor(run: Run, supervisor: subprocess.Popen[bytes], *, previous: ProcessIdentity | None) -> None:
    """Wait until a new supervisor is in the status of its run, which other commands take for lost until then.

    Raises:
        RequestError: it did not start.
    """
    deadline = time.monotonic() + 30.0
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
