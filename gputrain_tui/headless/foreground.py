"""Shows a run that this command started, forwards Ctrl-C, and waits for its end."""

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
from operator import itemgetter
from pathlib import Path

import msgspec

from gputrain_tui.headless.closing_report import LOG_LINES, closing_lines, failure_block, status_line
from gputrain_tui.headless.progress import REDRAW_S, ProgressView
from gputrain_tui.headless.safe_stream import SafeStream
from gputrain_tui.headless.styled_text import Piece, paint
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.runs import Run
from gputrain_tui.history.status_file import ENDED, Status, read_status
from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.remote_nodes import path_with_host
from gputrain_tui.output import json_line
from gputrain_tui.preflight.result import CheckResult, NotReadyError
from gputrain_tui.state import RunState
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.record import AnyEvent, RunEnded, decode_events
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import HELD_S
from trainer.host.processes import is_held
from trainer.host.stop_request import StopRequest

GIVEN_UP_S = 30.0
"""Seconds that a supervisor has to kill all processes of the run after its lease ended; then it is killed."""
STOPPING = "stopping every process of the run, once it has saved; Ctrl-C again to not wait for that"
NOT_WAITING = "not waiting"


class RecordReader(RunReader):
    """A ``RunReader`` that may copy what it reads to a stream."""

    out: SafeStream | None = None

    @property
    def refused(self) -> OSError | None:
        """Error of the stream; None while it works, and without one."""
        return self.out.error if self.out is not None else None


class JsonStream(RecordReader):
    """Copies every line to a stream, at the speed of the stream's reader."""

    budget_bytes = 1 << 20

    def __init__(self, run: Run, out: SafeStream) -> None:
        super().__init__(run.dir)
        self.out: SafeStream = out
        self._last: tuple[bytes, AnyEvent] | None = None

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        """Copy the new lines, by time; ``run_ended`` comes last of all."""
        if not self.out.has_room:
            return []
        found: list[tuple[float, bytes, AnyEvent]] = []
        for _, lines in self._follower.poll(self.budget_bytes):
            for line in lines.splitlines():
                for event in decode_events(line, self._world_size):
                    if isinstance(event, RunEnded):
                        self._last = (line, event)
                    else:
                        found.append((event.time, line, event))
        found.sort(key=itemgetter(0))
        lines_out = [line for _, line, _ in found]
        events = [event for _, _, event in found]
        if self._last is not None and not self._follower.backlog_bytes:
            lines_out.append(self._last[0])
            events.append(self._last[1])
            self._last = None
        self.out.write_bytes(b"".join(json_line(line) + b"\n" for line in lines_out))
        return events


def follow(
    supervisor: subprocess.Popen[bytes],
    *,
    state: RunState,
    view: ProgressView | None,
    reader: RecordReader,
    stop_request: StopRequest,
    say: Callable[[str], None],
) -> int:
    """Show a run until its supervisor has ended; return the supervisor's exit code.

    However this ends, also by an error, the lease is given up and nothing of the run is left. The stop request is
    forwarded to the supervisor; ``say`` writes a line that a person is to see.
    """
    poll = select.poll()
    ended = os.pidfd_open(supervisor.pid)
    poll.register(ended, select.POLLIN)
    poll.register(stop_request, select.POLLIN)
    asked_at = math.inf
    over = refused = False
    try:
        with stop_request.forwarded_to(ended):
            while True:
                if not over and supervisor.poll() is not None:  # asked before reading: what it wrote is read
                    over = True
                    poll.unregister(ended)
                out = reader.out
                taken = out is None or out.is_settled  # asked before reading, and before asking what was refused
                events = reader.poll()
                state.apply_all(events)
                if view is not None:
                    view.update(events)
                if level := stop_request.risen():
                    say(STOPPING if level == StopLevel.SAVE else NOT_WAITING)
                    asked_at = min(asked_at, time.monotonic())
                if not over and time.monotonic() - asked_at >= HELD_S and is_held(supervisor.pid):
                    supervisor.kill()  # another one finds out what became of the run, and ends it
                if over and stop_request.level and out is not None and out.is_stalled():
                    out.abandon()  # the run has ended as it was asked to, and so does this command
                if reader.refused is not None and out is not None and not refused:
                    refused = True
                    out.abandon()
                    if isinstance(reader.refused, BrokenPipeError):
                        supervisor.terminate()  # as at the end of any pipe, but not before the training is saved
                    else:
                        why = f"cannot write standard output: {reader.refused.strerror}"
                        say(f"{why}; the run goes on and is recorded")
                if (over and events) or (reader.backlog_bytes and (out is None or out.has_room)):
                    continue
                if over and taken and not reader.backlog_bytes:
                    return supervisor.returncode
                poll.poll(1e3 * REDRAW_S)
                stop_request.drain()
    finally:
        end_lease(supervisor)
        try:
            supervisor.wait(GIVEN_UP_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        os.close(ended)
        if view is not None:
            view.erase()


def read_rest(reader: RecordReader, state: RunState) -> None:
    """Read the rest of the record."""
    while True:
        state.apply_all(reader.poll())
        if not reader.backlog_bytes:
            return


def end_lease(supervisor: subprocess.Popen[bytes]) -> None:
    """End the lease: the supervisor stops every process of the run at once and leaves."""
    if supervisor.stdin is not None:
        supervisor.stdin.close()
    else:
        supervisor.terminate()
    supervisor.send_signal(signal.SIGCONT)


def _other_host(state: RunState) -> str:
    """Return the host on which the run failed; empty where that is this machine, or not known."""
    from gputrain_tui.hosts.host_names import is_local  # a healthy run does not wait for it
    from gputrain_tui.hosts.local_facts import local_facts

    host = (state.root_cause.host if state.root_cause is not None else None) or ""
    return "" if not host or is_local(host, local_facts((host,))) else host


def conclude(
    run: Run,
    returncode: int,
    state: RunState,
    *,
    narrate: bool,
    environ: Mapping[str, str],
    out: SafeStream,
    err: SafeStream,
    hurried: Callable[[], bool],
) -> int:
    """Report how the run ended; return the command's exit code.

    ``narrate``: standard output is for people. ``hurried``: the command was interrupted and waits for no reader.

    Raises:
        NotReadyError: a host refused the run before it trained; the run directory is removed again.
        RequestError: the ranks found the request wrong before they trained; the run directory is removed again.
    """
    status = _last_status(run, state)
    code = returncode if returncode >= 0 else ExitCode.FAILED
    refused = code in (ExitCode.BAD_REQUEST, ExitCode.REFUSED)
    if refused and not status.restarts and not attempt_outcome.holds_work(run.dir):
        from gputrain_tui.lifecycle.delete import delete_refused  # a healthy run does not wait for it

        delete_refused(run)
        err.settle(hurried=hurried)  # before what follows it
        if code == ExitCode.REFUSED:
            what = status.message or "a host refused it"
            raise NotReadyError([CheckResult(status="error", check="host", what=what, host=_other_host(state))])
        raise RequestError(status.message or "the request was wrong")
    if state.ended is None and status.status in ENDED:  # a full disk did not take the event
        ended = status.ended or state.time
        how = status.status
        state.apply(RunEnded(time=ended, status=how, exit_code=int(code), message=status.message))  # type: ignore[arg-type]
    colour = use_colour(sys.stderr.isatty(), environ)
    if narrate and (state.validations or all(view.last is not None for view in state.ranks.values())):
        columns = shutil.get_terminal_size().columns
        place = path_with_host(run.dir, 0, "")

        def is_there(path: str) -> bool:
            return bool(place) or Path(path).exists()

        for line in closing_lines(state, columns, is_there=is_there, place=place):
            out.write(paint(line, colour=use_colour(sys.stdout.isatty(), environ)) + "\n")
    out.settle(hurried=hurried)
    if narrate and out.error is not None and not isinstance(out.error, BrokenPipeError):
        err.line(f"gputrain: cannot write standard output: {out.error.strerror}")
    for line in _log_tail(run, status, state):
        err.line(paint(line, colour=colour))
    if narrate:
        err.line(paint([("record ", "dim"), (str(run.dir.path), "")], colour=colour))
    err.settle(hurried=hurried)
    return code


def _last_status(run: Run, state: RunState) -> Status:
    """Return what the run directory says at the end, or that it is gone."""
    status = read_status(run.dir)
    if status is not None or not attempt_outcome.is_deleted(run.dir):
        return status or run.status
    failure = attempt_outcome.deletion_failure(run.dir, time.time())
    if state.ended is None:
        ended = RunEnded(time=failure.time, status="failed", exit_code=ExitCode.FAILED, message=failure.message)
        state.apply_all([failure, ended])
    return msgspec.structs.replace(run.status, status="failed", message=failure.message)


def _log_tail(run: Run, status: Status, state: RunState) -> list[list[Piece]]:
    lines: list[list[Piece]] = []
    failure = state.root_cause
    if status.status == "failed" and failure is not None:
        node = next((view.node for view in state.ranks.values() if view.host == failure.host), None) or 0
        log = run.dir.rank_log(failure.rank) if failure.rank is not None else run.dir.node_log(node)
        lines += failure_block(failure, attempt_outcome.last_lines(log, LOG_LINES), str(log))
    if status.status == "failed" and status.message and (failure is None or status.message != failure.message):
        # What ended the last attempt, where it is not what ended the first; what the record could not take.
        lines.append([(status.message, "alarm")])
    lines.append(status_line(state))
    if status.status == "finished" and status.message:
        lines.append([(status.message, "alarm")])
    if status.status == "stopped":
        kept, _, left = (status.message or "").partition("processes left: ")
        lines.append([(kept.rstrip("; "), "")])
        lines.append([(f"processes left: {left}", "alarm") if left else ("no process of the run is left", "")])
    return lines


def use_colour(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to colour: on a terminal that can, unless ``NO_COLOR`` says otherwise (no-color.org)."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def progress_view(state: RunState, environ: Mapping[str, str], err: SafeStream) -> ProgressView:
    """Return the view that fits this terminal, or the log that stands in its place."""
    terminal = sys.stderr.isatty()
    return ProgressView(
        state,
        err,
        live=terminal and environ.get("TERM") != "dumb",
        colour=use_colour(terminal, environ),
        width=lambda: shutil.get_terminal_size().columns,
        keeps_up=lambda: not err.backlog_bytes,
    )


def open_reader(run: Run, *, out: SafeStream, json: bool) -> RecordReader:
    """Return what reads the run's record, and passes it on where that is asked for."""
    return JsonStream(run, out) if json else RecordReader(run.dir)
