"""Shows a run in the foreground: its progress or events, Ctrl-C forwarded to its supervisor, and its end."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from gputrain_tui.headless.closing_report import LOG_LINES, attempt_lines, closing_lines, failure_block, status_line
from gputrain_tui.headless.progress import REDRAW_S, Piece, ProgressView, fitted, paint
from gputrain_tui.headless.safe_stream import SafeStream
from gputrain_tui.history.lost_run import write_error
from gputrain_tui.history.plan_file import read_job, read_plan
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader, is_boundary, merged
from gputrain_tui.history.status_file import ENDED, Status, elapsed_of, read_status
from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.record_gap_watch import RecordGaps
from gputrain_tui.lifecycle.remote_nodes import path_with_host
from gputrain_tui.output import json_line
from gputrain_tui.preflight.result import CheckResult, NotReadyError
from gputrain_tui.state import RunState
from gputrain_tui.state.standstill import MIN_STANDSTILL_S
from trainer.contract.errors import ExitCode, RecordError, RequestError, printable
from trainer.contract.outcome import RECORD_END_MISSING
from trainer.contract.record import AnyEvent, RunDir, RunEnded
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import HELD_S
from trainer.host.processes import is_held
from trainer.host.stop_request import StopRequest

LEASE_END_TIMEOUT_S = 30.0
"""Time for a supervisor to kill all processes of the run after its lease ended, before it is killed."""
STOPPING = "stopping every process of the run, once it has saved; Ctrl-C again to stop without saving"
SCRIPT_STOPPING = (
    "stopping every process of the run; a script saves its own checkpoints, on SIGTERM; Ctrl-C again to stop at once"
)
NOT_WAITING = "not waiting for a checkpoint"
REFUSALS = (ExitCode.BAD_REQUEST, ExitCode.REFUSED)
"""Exit codes of a run that its ranks or a host refused."""


class JsonStream(RunReader):
    """Reader of a run's record that copies every line to a stream, at the speed of the stream's reader."""

    budget_bytes = 1 << 20

    def __init__(self, run: Run, out: SafeStream) -> None:
        super().__init__(run.dir)
        self._out = out
        self._last: list[tuple[bytes, AnyEvent]] = []

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        """Copy the new lines in the order of ``RunReader``; return their events."""
        if not self._out.has_room:
            return []
        files: list[list[tuple[bytes, AnyEvent]]] = []
        for name, lines in self._follower.poll(self.budget_bytes):
            pairs = [(line, event) for line in lines.splitlines() for event in self._known.decode(line)]
            if name == "run":
                self._last += [pair for pair in pairs if is_boundary(pair[1])]
                pairs = [pair for pair in pairs if not is_boundary(pair[1])]
            files.append(pairs)
        ordered = merged(files, lambda pair: pair[1].time)
        if self._last and not self._follower.backlog_bytes:
            ordered += self._last
            self._last = []
        self._out.write_bytes(b"".join(json_line(line) + b"\n" for line, _ in ordered))
        return [event for _, event in ordered]


def follow(
    supervisor: subprocess.Popen[bytes],
    *,
    run_dir: RunDir,
    state: RunState,
    view: ProgressView | None,
    reader: RunReader,
    out: SafeStream | None,
    stop_request: StopRequest,
    report: Callable[[str], None],
    is_script: bool,
) -> int:
    """Show a run until its supervisor has ended; return the supervisor's exit code.

    At the end, also after an error, the lease is ended, so that no process of the run is left.

    ``state`` receives the events; ``view`` is None with ``--json``; ``out``: stream to which the reader copies the
    events, None if it does not; ``report`` writes a line for people; ``is_script``: whether the ranks run a script, of
    whose checkpoints nothing is known.
    """
    poll = select.poll()
    ended = os.pidfd_open(supervisor.pid)
    poll.register(ended, select.POLLIN)
    poll.register(stop_request, select.POLLIN)
    requested_at = math.inf
    heard_at = time.monotonic()
    over = refused = unwritable = False
    try:
        with stop_request.forwarded_to(ended):
            while True:
                # Both are checked before reading and before the stream's error, so that none of the last is missed.
                if not over and supervisor.poll() is not None:
                    over = True
                    poll.unregister(ended)
                written = out is None or out.is_written
                events = reader.poll()
                state.apply_all(events)
                if view is not None:
                    view.update(events)
                if events:
                    heard_at = time.monotonic()
                silent_s = time.monotonic() - heard_at
                if silent_s >= MIN_STANDSTILL_S and not (over or unwritable) and (error := write_error(run_dir)):
                    unwritable = True
                    report(f"warning: the record ends here: {error}; no checkpoint is saved on that disk")
                if level := stop_request.risen():
                    saving = SCRIPT_STOPPING if is_script else STOPPING
                    report(saving if level == StopLevel.SAVE else NOT_WAITING)
                    requested_at = min(requested_at, time.monotonic())
                if not over and time.monotonic() - requested_at >= HELD_S and is_held(supervisor.pid):
                    supervisor.kill()  # the caller starts another one, which ends the run
                if over and stop_request.level and out is not None and out.is_stalled():
                    out.abandon()  # an interrupted command does not wait for a stalled reader
                if out is not None and out.error is not None and not refused:
                    refused = True
                    out.abandon()
                    if isinstance(out.error, BrokenPipeError):
                        report("the reader of standard output has closed it, which stops the run")
                        supervisor.terminate()  # saves first
                    else:
                        problem = f"cannot write standard output: {out.error.strerror}"
                        report(f"{problem}; the run continues and is recorded")
                if (over and events) or (reader.backlog_bytes and (out is None or out.has_room)):
                    continue
                if over and written and not reader.backlog_bytes:
                    return supervisor.returncode
                poll.poll(1e3 * REDRAW_S)
                stop_request.drain()
    finally:
        end_lease(supervisor)
        try:
            supervisor.wait(LEASE_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        os.close(ended)
        if view is not None:
            view.erase()


def end_lease(supervisor: subprocess.Popen[bytes]) -> None:
    """End the lease of a supervisor, which then saves, stops every process of the run and exits."""
    if supervisor.stdin is not None:
        supervisor.stdin.close()
    else:
        supervisor.terminate()
    supervisor.send_signal(signal.SIGCONT)


def _failed_host(state: RunState) -> str:
    """Return the host of the root cause; empty if it is this machine or not known."""
    from gputrain_tui.hosts.host_names import is_local  # imported only after a failure
    from gputrain_tui.hosts.local_facts import local_facts

    host = (state.root_cause.host if state.root_cause is not None else None) or ""
    return "" if not host or is_local(host, local_facts((host,))) else host


def conclude(
    run: Run,
    returncode: int,
    state: RunState,
    *,
    for_people: bool,
    environ: Mapping[str, str],
    out: SafeStream,
    err: SafeStream,
    is_interrupted: Callable[[], bool],
) -> int:
    """Print the closing report of a run; return the command's exit code.

    ``returncode``: of the supervisor, negative for a signal; ``state``: after the whole record; ``for_people``: whether
    to print for people, not only events; ``is_interrupted``: whether the command must not wait for stalled readers.

    Raises:
        NotReadyError: a host refused the run before it trained; the run directory is deleted, unless Slurm ran it.
        RequestError: the ranks found the request wrong before they trained; likewise.
    """
    code = returncode if returncode >= 0 else ExitCode.FAILED
    status = _last_status(run, state, code)
    if code in REFUSALS and not status.restarts and not attempt_outcome.holds_work(run.dir):
        message, host = status.message or "a host refused the run", _failed_host(state)
        refusal = CheckResult(status="error", check="host", what=message, host=host)
        if keeps_refused(run):
            err.line(f"gputrain: {printable(refusal.line)}")
            if for_people:
                err.line(paint(_record_line(run), colour=use_colour(sys.stderr.isatty(), environ)))
            out.close(is_interrupted=is_interrupted)
            err.close(is_interrupted=is_interrupted)
            return code
        from gputrain_tui.lifecycle.delete import delete_refused  # imported only after a refusal

        delete_refused(run)
        err.close(is_interrupted=is_interrupted)  # the caller prints the error directly to stderr
        if code == ExitCode.REFUSED:
            raise NotReadyError([refusal])
        raise RequestError(message)
    if state.ended is None and status.status in ENDED:  # the event was lost on a full disk
        ended = status.ended or state.time
        how = status.status
        took = None if status.elapsed_s is None else 1e3 * status.elapsed_s
        state.apply_all(RecordGaps(run.dir, read_plan(run.dir)).check(is_last=True))  # these were lost as well
        state.apply(RunEnded(time=ended, status=how, exit_code=int(code), message=status.message, elapsed_ms=took))  # type: ignore[arg-type]
    colour = use_colour(sys.stderr.isatty(), environ)
    err.drain(is_interrupted=is_interrupted)  # another thread erases the progress line, before the table is printed
    if for_people and (state.validations or all(view.last is not None for view in state.ranks.values())):
        width, terminal = shutil.get_terminal_size().columns, sys.stdout.isatty()
        for line in closing_lines(state, width, host=path_with_host(run.dir, 0, "")):
            for each in fitted(line, width) if terminal else [line]:
                out.write(paint(each, colour=use_colour(terminal, environ)) + "\n")
    out.close(is_interrupted=is_interrupted)
    if for_people and out.error is not None and not isinstance(out.error, BrokenPipeError):
        err.line(f"gputrain: cannot write standard output: {out.error.strerror}")
    for line in _end_lines(run, status, state):
        for each in fitted(line, shutil.get_terminal_size().columns) if sys.stderr.isatty() else [line]:
            err.line(paint(each, colour=colour))
    if for_people and run.dir.path.exists():  # it may have been deleted during the run
        err.line(paint(_record_line(run), colour=colour))
    err.close(is_interrupted=is_interrupted)
    return exit_code_with(code, out.error)


def exit_code_with(code: int, error: OSError | None) -> int:
    """Return the command's exit code by that of the run: 1 if it has finished, but standard output lacks a part.

    ``error``: of standard output; a closed pipe is none, as its reader has what it wants.
    """
    lacks = error is not None and not isinstance(error, BrokenPipeError)
    return ExitCode.FAILED if lacks and code == ExitCode.FINISHED else code


def keeps_refused(run: Run) -> bool:
    """Whether a run that its nodes refused keeps its directory: of a job, only that shows what each node said."""
    return read_job(run.dir) is not None


def _record_line(run: Run) -> list[Piece]:
    return [("record ", "dim"), (str(run.dir.path), "")]


def _last_status(run: Run, state: RunState, code: int) -> Status:
    """Return the final status; if the run directory was deleted, a failed one, with its events in the state.

    Where the record could not take the end of the run, it is that of the exit code.
    """
    status = read_status(run.dir)
    if status is not None and status.status not in ENDED and (error := write_error(run.dir)):
        now, how = time.time(), "failed"
        if code in (ExitCode.FINISHED, ExitCode.STOPPED):
            how = "finished" if code == ExitCode.FINISHED else "stopped"
        state.add_gap(now, f"{RECORD_END_MISSING}: {error}")
        message = None if state.ended is None else state.ended.message
        took = elapsed_of(status, now)
        return msgspec.structs.replace(status, status=how, message=message, ended=now, elapsed_s=took)
    if status is not None or not attempt_outcome.is_deleted(run.dir):
        return status or run.status
    failure = attempt_outcome.deletion_failure(run.dir, time.time())
    if state.ended is None:
        ended = RunEnded(time=failure.time, status="failed", exit_code=ExitCode.FAILED, message=failure.message)
        state.apply_all([failure, ended])
    return msgspec.structs.replace(run.status, status="failed", message=failure.message)


def _end_lines(run: Run, status: Status, state: RunState) -> list[list[Piece]]:
    """Return the failure with its log tail, the status line and the processes that are left."""
    lines = attempt_lines(state)
    failure = state.root_cause
    if status.status == "failed" and failure is not None:
        own = failure.rank is not None
        log = run.dir.rank_log(failure.rank or 0) if own else run.dir.node_log(_node_on(failure.host, run, state))
        lines += failure_block(failure, attempt_outcome.last_lines(log, LOG_LINES), str(log))
    if status.status == "failed" and status.message and (failure is None or status.message != failure.message):
        # The failure of the last attempt if it differs from the root cause in the record, or a note on the record.
        lines.append([(status.message, "alarm")])
    lines.append(status_line(state))
    if not state.step and (unseen := state.unmeasured) is not None and unseen.severity == "info":
        lines.append([(f"  {unseen.advice}", "dim")])  # that of a warning was printed with it
    gap = state.record_gap
    if status.status == "finished" and status.message and not (gap and status.message.endswith(gap)):
        lines.append([(status.message, "alarm")])
    if status.status == "stopped":
        kept, _, left = (status.message or "").partition("processes left: ")
        lines += [[(kept.rstrip("; "), "")]] * bool(kept)
        is_silent = any(finding.kind == "host_silent" for finding in state.findings.values())
        none = "no process of the run is left" + (" on the hosts that answer" if is_silent else "")
        lines.append([(f"processes left: {left}", "alarm") if left else (none, "")])
    return lines


def _node_on(host: str | None, run: Run, state: RunState) -> int:
    """Return the node on a host, by its ranks or, before these record, by the plan; the first one if none is known."""
    known = [(view.host, view.node) for view in state.ranks.values()]
    with suppress(RecordError):
        known += [(node.host, node.node) for node in read_plan(run.dir).nodes]
    return next((node for name, node in known if name == host and node is not None), 0)


def use_colour(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to use colours: on a terminal that is not ``dumb``, without ``NO_COLOR`` (no-color.org)."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def progress_view(state: RunState, environ: Mapping[str, str], err: SafeStream) -> ProgressView:
    """Return the view of a run's progress on standard error: a live line on a terminal, else plain lines."""
    terminal = sys.stderr.isatty()
    return ProgressView(
        state,
        err,
        live=terminal and environ.get("TERM") != "dumb",
        colour=use_colour(terminal, environ),
        width=lambda: shutil.get_terminal_size().columns,
        keeps_up=lambda: not err.backlog_bytes,
    )
