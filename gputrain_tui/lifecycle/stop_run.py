"""Stops the processes of a run on all its nodes, and reports those that do not end."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from gputrain_tui import paths
from gputrain_tui.history.lost_run import write_error
from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run, find, open_run
from gputrain_tui.history.status_file import ENDED, read_status
from gputrain_tui.lifecycle import attempt_outcome, launchers
from gputrain_tui.lifecycle.directory_watch import supervisor_beats, write_stop_file
from gputrain_tui.lifecycle.leftovers import kill_processes, living_runs, open_process, supervisors_of
from gputrain_tui.lifecycle.polling import wait_until
from gputrain_tui.lifecycle.remote_nodes import attempt_folders
from gputrain_tui.lifecycle.supervisor_process import adopt
from gputrain_tui.plan.planner import stop_grace
from trainer.contract.errors import RecordError, RequestError, quoted
from trainer.contract.options import Distributed
from trainer.contract.outcome import SAVE_TIMEOUT_S, node_outcome
from trainer.contract.record import RunDir
from trainer.contract.record.numbers import MAX_RANKS
from trainer.host.process_identity import HELD_S, is_alive
from trainer.host.processes import SUPERVISOR, is_held
from trainer.host.stop_request import STOP_COMMAND_SIGNAL, STOP_REASONS

SUPERVISOR_EXIT_S = 5.0
"""Time for the supervisor beyond the time limits of the ranks, and time to end after SIGKILL."""
SUPERVISOR_START_S = 3.0
"""Time for the supervisor process of a new run to exist; its modules may take longer to load."""
MAX_SUPERVISORS = 3
"""Supervisors that are stopped in turn: the run's own, and adopting ones that another command may start meanwhile."""


def stop_by_name(wanted: str, origin: int = STOP_COMMAND_SIGNAL) -> tuple[str, list[int]]:
    """Stop a run by its id, a prefix of it or ``last``; also a run with processes but without a readable directory.

    Return one line about the end of the run, and the processes that do not end; raise as ``stop`` does.
    """
    lost = {name: path for name, path in living_runs(paths.runs_folder()).items() if open_run(path) is None}
    if wanted in lost:
        return _stop_without_record(lost[wanted], origin)
    fitting = sorted(name for name in lost if wanted and name.startswith(wanted))
    try:
        run = find(wanted)
    except RequestError:
        if len(fitting) != 1:
            raise
        return _stop_without_record(lost[fitting[0]], origin)
    if fitting and wanted not in (run.id, "last"):
        raise RequestError(f"{quoted(wanted)} fits {len(fitting) + 1} runs: {', '.join([run.id, *fitting])}")
    if run.state == "lost":
        print(f"the supervisor of {run.id} was killed; taking over", file=sys.stderr)
    return stop(run, origin)


def stop(run: Run, origin: int = STOP_COMMAND_SIGNAL) -> tuple[str, list[int]]:
    """Stop a run on all its nodes; return one line about its end, and the processes that do not end.

    The supervisor is found by its environment: its pid in ``status.json`` may be out of date, copied or forged.

    Raises:
        RequestError: the run belongs to another machine, or no supervisor could end it.
    """
    path = run.dir.path
    if run.status.archived is not None:
        raise RequestError(f"stop: {run.id} is an archive; it has no processes to stop")
    if run.status.by_hand and run.state not in ENDED:
        raise RequestError(
            f"stop: the commands of {run.id} are typed by hand; "
            "end those that run with Ctrl-C in their terminals, or with scancel"
        )
    job_ended = launchers.stop_job(run, origin, timeout_s=_stop_timeout_s(run.dir))
    if job_ended is not None:
        return _report(job_ended, [], was_over=run.state in ENDED), []
    _await_supervisor(run)
    taken_over = run.state == "lost"
    supervisor = run.status.supervisor
    if run.state not in ENDED and supervisor is not None and not supervisors_of(path) and is_alive(supervisor) is None:
        if supervisor_beats(run.dir):
            return _stop_through_file(run, supervisor.host, origin)
        if not all(attempt_folders(run.dir, node.node) for node in read_plan(run.dir).nodes):
            raise RequestError(f"stop: {run.id} runs on {supervisor.host}, and so do some of its ranks; stop it there")
        print(f"the supervisor of {run.id} on {supervisor.host} is gone; taking over", file=sys.stderr)
        run, taken_over = adopt(run), True
    now, problem = run, ""
    for _ in range(MAX_SUPERVISORS):
        in_order = _end_supervisors(path, _stop_timeout_s(run.dir), origin)
        taken_over |= not all(in_order)
        if not path.exists():
            return _stop_without_record(path, origin, complete=bool(in_order) and not taken_over)
        now = open_run(path) or now
        if now.state in ENDED:
            break
        if write_error(run.dir):
            return _stop_without_record(path, origin, complete=bool(in_order) and not taken_over)
        taken_over = True
        try:
            now = adopt(now)
        except RequestError as error:  # or another command's supervisor has adopted it, and is stopped next
            problem = str(error)
    left = kill_processes(path)
    if now.state not in ENDED:
        raise RequestError(f"{problem or f'{now.id} is {now.state}'}; {_left(left, complete=False)}")
    is_silent = any(finding.kind == "host_silent" for finding in now.status.findings)
    complete = not taken_over or _has_all_outcomes(run.dir)
    return _report(now, left, was_over=run.state in ENDED, complete=complete, is_silent=is_silent), left


def _stop_through_file(run: Run, host: str, origin: int) -> tuple[str, list[int]]:
    """Stop a run whose supervisor is on another host, through the stop file in the shared run directory."""
    try:
        write_stop_file(run.dir, STOP_REASONS[origin])
    except OSError as error:
        raise RequestError(f"stop: {run.dir.stop} cannot be written: {error.strerror}") from None

    def has_ended() -> bool:
        status = read_status(run.dir)
        return status is not None and status.status in ENDED

    if not wait_until(has_ended, _stop_timeout_s(run.dir)):
        raise RequestError(f"stop: {run.id} runs on {host} and has not ended; stop it there")
    return _report(open_run(run.dir.path) or run, [], was_over=False), []


def _has_all_outcomes(run_dir: RunDir) -> bool:
    """Whether the agent of each node has recorded its end, before which it has killed all of its descendants."""
    try:
        return all(node_outcome(run_dir, node.node) is not None for node in read_plan(run_dir).nodes)
    except RecordError:
        return False


def _report(run: Run, left: list[int], *, was_over: bool, complete: bool = True, is_silent: bool = False) -> str:
    if was_over:
        how = f"{'was' if run.state == 'stopped' else 'has'} {run.state} already"
    elif run.state == "failed" and run.status.message:
        how = f"has failed: {run.status.message}"
    else:
        kept = attempt_outcome.describe_kept(run.dir, _recorded_nodes(run.dir)) if run.state == "stopped" else ""
        how = f"is {run.state}" + (kept and f" {kept}")
    return f"{run.id} {how}; {_left(left, complete=complete, is_silent=is_silent)}"


def _recorded_nodes(run_dir: RunDir) -> list[int]:
    """Return the nodes with a recorded outcome."""
    numbers = (int(path.stem) for path in run_dir.nodes.glob("*.json") if path.stem.isdecimal())
    return sorted(number for number in numbers if number < MAX_RANKS)


def _stop_without_record(path: Path, origin: int, *, complete: bool = False) -> tuple[str, list[int]]:
    """Stop the processes of a run whose directory was deleted, or cannot be read or written.

    ``complete``: its own supervisor has ended all of them before.
    """
    in_order = _end_supervisors(path, _stop_timeout_s(RunDir(path)), origin)
    complete |= bool(in_order) and all(in_order)
    left = kill_processes(path)
    run = open_run(path)
    if run is not None and run.state in ENDED:  # its supervisor has written the status again
        return _report(run, left, was_over=False, complete=complete), left
    error = "" if run is None else write_error(run.dir)
    problem = f"cannot be written: {error}" if error else "cannot be read" if path.exists() else "was deleted"
    return f"{path.name} is stopped; its run directory {problem}; {_left(left, complete=complete)}", left


def _left(pids: list[int], *, complete: bool = True, is_silent: bool = False) -> str:
    """Return the processes left.

    ``complete``: each process was a descendant of one that has ended them all; ``is_silent``: a host does not answer.
    """
    none = ("none" if complete else "none found") + (" on the hosts that answer" if is_silent else "")
    return f"processes left: {', '.join(map(str, pids)) or none}"


def _stop_timeout_s(run_dir: RunDir) -> float:
    """Return the time limit of a stop: the ranks answer, save and exit, and the supervisor ends."""
    try:
        grace_s = max(stop_grace(node.argv) for node in read_plan(run_dir).nodes)
    except RecordError:
        grace_s = Distributed().stop_grace
    return grace_s + SAVE_TIMEOUT_S + 2 * SUPERVISOR_EXIT_S


def _await_supervisor(run: Run) -> None:
    """Wait until the supervisor process of a new run exists, as long as the command that created the run is alive."""
    creator = run.status.supervisor
    if run.state == "starting" and creator is not None:
        wait_until(lambda: bool(supervisors_of(run.dir.path)) or not is_alive(creator), SUPERVISOR_START_S)


def _end_supervisors(run_dir: Path, patience_s: float, origin: int) -> list[bool]:
    """Send a stop request to the supervisors of a run, wait for their end, and return for each if it ended by itself.

    A supervisor adopts the orphans of its run and kills them at its end. A successor stops the run once it takes over.
    """
    opened = [(pid, open_process(pid, run_dir, SUPERVISOR)) for pid in supervisors_of(run_dir)]
    supervisors = [(pid, descriptor) for pid, descriptor in opened if descriptor is not None]
    try:
        for _, descriptor in supervisors:
            for number in (origin, signal.SIGCONT):  # a stopped process runs no handler
                with suppress(OSError):
                    signal.pidfd_send_signal(descriptor, number)
        return [_await_end(pid, descriptor, patience_s) for pid, descriptor in supervisors]
    finally:
        for _, descriptor in supervisors:
            os.close(descriptor)


def _await_end(pid: int, descriptor: int, patience_s: float) -> bool:
    """Wait for the end of a supervisor; kill it if it is held (stopped or traced) or too slow, and return False."""
    waiter = select.poll()
    waiter.register(descriptor, select.POLLIN)
    with suppress(OSError):
        if waiter.poll(HELD_S * 1000) or (not is_held(pid) and waiter.poll(patience_s * 1000)):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    waiter.poll(SUPERVISOR_EXIT_S * 1000)
    return False
