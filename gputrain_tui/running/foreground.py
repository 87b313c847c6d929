"""Follows a run that this command started: shows it, passes Ctrl-C on, and waits until nothing of it is left."""

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
from typing import Protocol, TextIO

import msgspec

from gputrain_tui import headless
from gputrain_tui.reading.tail import Follower
from gputrain_tui.running import outcome
from gputrain_tui.running.interrupts import Interrupts
from gputrain_tui.running.outlet import Outlet, silence
from gputrain_tui.running.processes import HELD_S, is_held
from gputrain_tui.runs import Run, RunReader, Status, read_status
from gputrain_tui.state import RunState
from gputrain_tui.tables import printable
from trainer.errors import ExitCode, RequestError
from trainer.record import AnyEvent, RunEnded, decode_events

POLL_MS = 100
"""How often the record is looked at while the supervisor runs."""
GIVEN_UP_S = 30.0
"""How long a supervisor that was given up may take to end the run at once."""
LOG_LINES = 12
"""How much of the culprit's output is shown."""


ASKED = "stopping every process of the run, once it has saved; Ctrl-C again to not wait for that"
ASKED_AGAIN = "not waiting"


class Reader(Protocol):
    """Gives the events that were appended since it was asked last."""

    def poll(self) -> list[AnyEvent]:
        """Return the new events in the order of their times."""

    @property
    def backlog_bytes(self) -> int:
        """What the last poll left for the next."""

    @property
    def refused(self) -> OSError | None:
        """What the stream answered that no longer takes what is passed on; None while it takes it."""

    def close(self) -> None:
        """Let go of the files."""


class RecordReader(RunReader):
    """Reads and passes nothing on."""

    refused = None


class JsonStream:
    """Reads like ``RunReader`` and passes every line on as it was written, as long as somebody takes it."""

    budget_bytes = 8 << 20

    def __init__(self, run: Run, out: TextIO) -> None:
        self._follower = Follower(run.dir.events, ".ndjson")
        self._out = out
        self.refused: OSError | None = None
        self._last: tuple[bytes, AnyEvent] | None = None

    def poll(self) -> list[AnyEvent]:
        """Print the new lines in the order of their times; the end of the run comes last of all."""
        found: list[tuple[float, bytes, AnyEvent]] = []
        for _, lines in self._follower.poll(self.budget_bytes):
            for line in lines.splitlines():
                for event in decode_events(line):
                    if isinstance(event, RunEnded):
                        self._last = (line, event)
                    else:
                        found.append((event.time, line, event))
        found.sort(key=itemgetter(0))
        lines_out = [line for _, line, _ in found]
        events = [event for _, _, event in found]
        if self._last is not None and not self.backlog_bytes:
            lines_out.append(self._last[0])
            events.append(self._last[1])
            self._last = None
        if lines_out and self.refused is None:
            try:
                self._out.buffer.write(b"\n".join(lines_out) + b"\n")
                self._out.flush()
            except OSError as error:
                self.refused = error
                silence(self._out)
        return events

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the last poll left for the next."""
        return self._follower.backlog_bytes

    def close(self) -> None:
        """Let go of the files."""
        self._follower.close()


def follow(
    supervisor: subprocess.Popen[bytes],
    *,
    state: RunState,
    view: headless.Headless | None,
    reader: Reader,
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> int:
    """Show a run until its supervisor has ended; return the supervisor's exit code.

    However this ends, also by an error, the lease is given up and nothing of the run is left.

    Args:
        supervisor: who answers for the run.
        state: takes in what is read.
        view: shows it.
        reader: reads the record.
        interrupts: what asks this command to end; it is passed on.
        say: writes a line that a person is to see.
    """
    poll = select.poll()
    ended = os.pidfd_open(supervisor.pid)
    poll.register(ended, select.POLLIN)
    poll.register(interrupts, select.POLLIN)
    asked: set[int] = set()
    asked_at = math.inf
    refused = False
    try:
        while True:
            over = supervisor.poll() is not None  # asked before reading: what it wrote is read
            events = reader.poll()
            state.apply_all(events)
            if view is not None:
                view.update(events)
            for number in interrupts.take():
                for each in (number, signal.SIGCONT):  # a supervisor that was stopped by a signal hears only then
                    supervisor.send_signal(each)
                if number == signal.SIGINT and number in asked:
                    say(ASKED_AGAIN)
                elif not asked or number == signal.SIGINT:
                    say(ASKED)
                asked.add(number)
                asked_at = min(asked_at, time.monotonic())
            if time.monotonic() - asked_at >= HELD_S and is_held(supervisor.pid):
                supervisor.kill()  # another one finds out what became of the run, and ends it
            if reader.refused is not None and not refused:
                refused = True
                if isinstance(reader.refused, BrokenPipeError):
                    supervisor.terminate()  # as at the end of any pipe, but not before the training is saved
                else:
                    say(f"cannot write standard output: {reader.refused.strerror}; the run goes on and is recorded")
            if reader.backlog_bytes:
                continue
            if over:
                return supervisor.returncode
            poll.poll(POLL_MS)
            interrupts.drain()
    finally:
        give_up(supervisor)
        try:
            supervisor.wait(GIVEN_UP_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        os.close(ended)
        if view is not None:
            view.erase()


def give_up(supervisor: subprocess.Popen[bytes]) -> None:
    """End the lease: the supervisor stops every process of the run at once and leaves."""
    if supervisor.stdin is not None:
        supervisor.stdin.close()
    else:
        supervisor.terminate()
    supervisor.send_signal(signal.SIGCONT)


def conclude(
    run: Run, returncode: int, state: RunState, *, narrate: bool, environ: Mapping[str, str], err: Outlet
) -> int:
    """Say how the run ended; return the command's exit code, which no unwritten word of this changes.

    Args:
        run: the run.
        returncode: of its supervisor.
        state: what its record says.
        narrate: whether standard output is for people.
        environ: says whether to colour.
        err: standard error.

    Raises:
        RequestError: the ranks found the request wrong before they trained; the run directory is removed again.
    """
    status = _last_status(run, state)
    code = returncode if returncode >= 0 else ExitCode.FAILED
    if code == ExitCode.BAD_REQUEST and state.step == 0:
        shutil.rmtree(run.dir.path, ignore_errors=True)
        raise RequestError(status.message or "the request was wrong")
    colour = use_colour(sys.stderr.isatty(), environ)
    if narrate and all(view.last is not None for view in state.ranks.values()):
        columns, out = shutil.get_terminal_size().columns, Outlet(sys.stdout)
        for line in headless.closing_lines(state, columns):
            out.write(headless.paint(line, colour=use_colour(sys.stdout.isatty(), environ)) + "\n")
        out.settle()
        if out.trouble is not None and not isinstance(out.trouble, BrokenPipeError):
            err.line(f"gputrain: cannot write standard output: {out.trouble.strerror}")
    for line in _last_words(run, status, state):
        err.line(headless.paint(line, colour=colour))
    if narrate:
        err.line(headless.paint([("record ", "dim"), (str(run.dir.path), "")], colour=colour))
    err.settle()
    return code


def _last_status(run: Run, state: RunState) -> Status:
    """Return what the run directory says at the end, or that it is gone."""
    status = read_status(run.dir)
    if status is not None or not outcome.is_deleted(run.dir):
        return status or run.status
    failure = outcome.deleted(run.dir, time.time())
    if state.ended is None:
        ended = RunEnded(time=failure.time, status="failed", exit_code=ExitCode.FAILED, message=failure.message)
        state.apply_all([failure, ended])
    return msgspec.structs.replace(run.status, status="failed", message=failure.message)


def _last_words(run: Run, status: Status, state: RunState) -> list[list[headless.Piece]]:
    lines: list[list[headless.Piece]] = []
    failure = state.root_cause
    if status.status == "failed" and failure is not None:
        node = next((view.node for view in state.ranks.values() if view.host == failure.host), None) or 0
        log = run.dir.rank_log(failure.rank) if failure.rank is not None else run.dir.node_log(node)
        lines += headless.failure_block(failure, outcome.last_lines(log, LOG_LINES), str(log))
    lines.append(headless.ending(state))
    if status.status == "finished" and status.message:
        lines.append([(printable(status.message), "alarm")])
    if status.status == "stopped":
        kept, _, left = (status.message or "").partition("processes left: ")
        lines.append([(printable(kept.rstrip("; ")), "")])
        lines.append([(f"processes left: {left}", "alarm") if left else ("no process of the run is left", "")])
    return lines


def use_colour(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to colour: on a terminal that can, unless ``NO_COLOR`` says otherwise (no-color.org)."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def show(state: RunState, environ: Mapping[str, str], err: Outlet) -> headless.Headless:
    """Return the view that fits this terminal, or the log that stands in its place."""
    terminal = sys.stderr.isatty()
    return headless.Headless(
        state,
        err,
        live=terminal and environ.get("TERM") != "dumb",
        colour=use_colour(terminal, environ),
        width=lambda: shutil.get_terminal_size().columns,
    )


def reader_of(run: Run, *, json: bool) -> Reader:
    """Return what reads the run's record, and passes it on where that is asked for."""
    return JsonStream(run, sys.stdout) if json else RecordReader(run.dir)
