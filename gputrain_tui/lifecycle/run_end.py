"""Writes the end of a run whose supervisor was killed before doing so.

The supervisor writes it; if it was killed, the adopting one; if that was killed too, the command in the foreground.
The writer holds the lock of the run directory, so that a final status is never overwritten.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from gputrain_tui.history.status_file import ENDED, read_status
from gputrain_tui.lifecycle import attempt_outcome, leftovers
from gputrain_tui.lifecycle.attempt import AttemptResult, failed, read_attempt
from gputrain_tui.lifecycle.polling import wait_until
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.plan.planner import Plan
from trainer.contract.errors import ExitCode
from trainer.contract.record import RunDir, RunEnded, decode_events
from trainer.contract.record.regular_file import open_to_append, read_tail
from trainer.host.temporary_folder import delete_temporary_folders


def take_lock(lock: IO[bytes], *, patience_s: float, give_up: Callable[[], bool] = bool) -> bool:
    """Take the lock of a run directory; return False if another process holds it.

    A process that a killed supervisor was forking holds it until its exec: hence ``patience_s``.
    """

    def is_taken() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    return wait_until(lambda: is_taken() or give_up(), patience_s) and is_taken()


def is_recorded(run_dir: RunDir) -> bool:
    """Whether the status is final, or the run directory was deleted."""
    status = read_status(run_dir)
    return not run_dir.path.is_dir() if status is None else status.status in ENDED


def recorded_exit_code(run_dir: RunDir, plan: Plan) -> int | None:
    """Return the exit code of a run whose end is recorded, else None; for the holder of the lock.

    If a supervisor was killed between the ``run_ended`` event and the status, the status is written from the event.
    """
    status, writer = read_status(run_dir), RunStatusWriter(run_dir, plan)
    if status is None or status.status not in ENDED:
        try:
            events = decode_events(read_tail(run_dir.run_events).rpartition(b"\n")[0] + b"\n")
        except OSError:
            return None
        if not events or not isinstance(events[-1], RunEnded):
            return None
        writer.confirm(events[-1])
    _report_end(run_dir, writer)
    return ExitCode.FAILED if writer.status.exit_code is None else writer.status.exit_code


def record_end(run_dir: RunDir, plan: Plan, returncode: int, *, give_up: Callable[[], bool]) -> int:
    """Kill the processes of a run without a supervisor and write its end; return its exit code.

    ``returncode`` is of the last supervisor; ``give_up`` ends the wait for another one that has adopted the run.
    """
    try:
        lock = os.fdopen(open_to_append(run_dir.lock), "ab")
    except OSError:
        return returncode if returncode >= 0 else ExitCode.FAILED
    with lock:
        if not take_lock(lock, patience_s=float("inf"), give_up=lambda: is_recorded(run_dir) or give_up()):
            status = read_status(run_dir)
            return ExitCode.FAILED if status is None or status.exit_code is None else status.exit_code
        if (code := recorded_exit_code(run_dir, plan)) is not None:
            return code
        launched = read_attempt(run_dir)
        left = leftovers.kill_processes(run_dir.path)
        delete_temporary_folders(run_dir.path, [node.node for node in plan.nodes], Path(launched.tmp))
        if not left:
            attempt_outcome.delete_partial_checkpoints(run_dir)
        ended = _result(run_dir, plan, returncode, launched.since)
        writer = RunStatusWriter(run_dir, plan)
        code = writer.close(ended, left=left)
        _report_end(run_dir, writer)
        return code


def _report_end(run_dir: RunDir, writer: RunStatusWriter) -> None:
    from gputrain_tui.lifecycle.report_sinks import report_end  # a slow import, which a healthy run's supervisor skips

    report_end(run_dir, writer)


def _result(run_dir: RunDir, plan: Plan, returncode: int, since: dict[str, int]) -> AttemptResult:
    if not any(attempt_outcome.unfinished(run_dir, node.node, node.ranks, since) for node in plan.nodes):
        return AttemptResult(status="finished")
    if returncode == ExitCode.STOPPED:
        return AttemptResult(status="stopped", reason="its supervisor was stopped")
    recorded = attempt_outcome.recorded_cause(run_dir, since, [node.node for node in plan.nodes])
    if recorded is not None:
        return AttemptResult(
            status="failed", failure=recorded, recorded=recorded in attempt_outcome.failures(run_dir, since)
        )
    if returncode < 0:
        return failed("signal", "the run's supervisor was killed, and its ranks with it")
    return failed("exit", f"the run's supervisor failed; see the end of {run_dir.logs / 'supervisor.log'}")
