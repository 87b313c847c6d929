"""Request of a rank's Python stack by a signal; ``faulthandler`` writes it to the rank's log."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.lifecycle.leftovers import processes_of
from gputrain_tui.lifecycle.remote_nodes import attempt_folders
from gputrain_tui.state import RankView
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_part, size_of
from trainer.host.stop_request import STACK_SIGNAL


class StackRequest:
    """Request for one process's stack."""

    def __init__(self, log: Path, offset: int) -> None:
        self._log = log
        self._offset = offset

    def answer(self) -> list[str]:
        """Return the lines of the stack in the rank's log; empty until the process has answered."""
        try:  # a stack has some kilobytes
            text = read_part(self._log, self._offset, 256 << 10).decode("utf-8", "replace")
        except OSError:
            return []
        lines = text.splitlines()
        begin = next((i for i, line in enumerate(lines) if "(most recent call first)" in line), None)
        return [] if begin is None else lines[begin:]


def request_stack(run_dir: RunDir, view: RankView) -> StackRequest:
    """Signal a rank's process to print its stack; on another host, through its node agent.

    Raises:
        RequestError: the process is not running, or runs on a host without a reachable node agent.
    """
    if view.pid is None:
        raise RequestError(f"rank {view.rank} has no process yet")
    if view.host is not None and view.host not in (socket.gethostname(), "localhost"):
        return _request_over_ssh(run_dir, view)
    # A pid may be reused by another process: the run's environment variable proves that this one belongs to the run.
    if view.pid not in processes_of(run_dir.path):
        raise RequestError(f"rank {view.rank} is not running any more")
    log = run_dir.rank_log(view.rank)
    offset = size_of(log)
    try:
        os.kill(view.pid, STACK_SIGNAL)
    except ProcessLookupError:
        raise RequestError(f"rank {view.rank} is not running any more") from None
    return StackRequest(log, offset)


def _request_over_ssh(run_dir: RunDir, view: RankView) -> StackRequest:
    if view.node is None or not attempt_folders(run_dir, view.node):
        raise RequestError(f"rank {view.rank} runs on {view.host}: send SIGQUIT to process {view.pid} there")
    from gputrain_tui.hosts.host_channel import HostError  # imported here, so that the console starts faster
    from gputrain_tui.lifecycle.launchers.ssh_launcher import request_stacks

    node = read_plan(run_dir).nodes[view.node]

    def ask() -> None:
        # A host that does not answer is reported like a rank that does not: by the timeout.
        with suppress(HostError, RequestError):
            request_stacks(node, run_dir, view.pid or 0)

    log = run_dir.rank_log(view.rank)
    request = StackRequest(log, size_of(log))
    threading.Thread(target=ask, name="stack-request", daemon=True).start()
    return request
