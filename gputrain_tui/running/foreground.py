"""Follows a run that this command started: shows it, passes Ctrl-C on, and waits until nothing of it is left."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from operator import itemgetter
from typing import BinaryIO, Protocol

from gputrain_tui import headless
from gputrain_tui.reading.tail import Follower
from gputrain_tui.running import outcome
from gputrain_tui.running.interrupts import Interrupts
from gputrain_tui.runs import Run, RunReader, Status, read_status
from gputrain_tui.state import RunState
from gputrain_tui.tables import printable
from trainer.errors import ExitCode, RequestError
from trainer.record import AnyEvent, RunEnded, decode_events

POLL_MS = 100
"""How often the record is looked at while the supervisor runs."""
LOG_LINES = 12
"""How much of the culprit's output is shown."""


ASKED = "stopping every process of the run, once it has saved; again to not wait for that"
ASKED_AGAIN = "not waiting"


class Reader(Protocol):
    """Gives the events that were appended since it was asked last."""

    def poll(self) -> list[AnyEvent]:
        """Return the new events in the order of their times."""

    @property
    def backlog_bytes(self) -> int:
        """What the last poll left for the next."""

    def close(self) -> None:
        """Let go of the files."""


class JsonStream:
    """Reads like ``RunReader`` and passes every line on as it was written."""

    budget_bytes = 8 << 20

    def __init__(self, run: Run, out: BinaryIO) -> None:
        self._follower = Follower(run.dir.events, ".ndjson")
        self._out = out
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
        if lines_out:
            self._out.write(b"\n".join(lines_out) + b"\n")
            self._out.flush()
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
) -> int:
    """Show a run until its supervisor has ended; return the supervisor's exit code.

    However this ends, also by an error, the lease is given up and nothing of the run is left.
    """
    poll = select.poll()
    ended = os.pidfd_open(supervisor.pid)
    poll.register(ended, select.POLLIN)
    poll.register(interrupts, select.POLLIN)
    heard = 0
    try:
        while True:
            over = supervisor.poll() is not None  # asked before reading: what it wrote is read
            events = reader.poll()
            state.apply_all(events)
            if view is not None:
                view.update(events)
            if interrupts.asked > heard:
                line = ASKED if heard == 0 else ASKED_AGAIN
                heard = interrupts.asked
                supervisor.send_signal(signal.SIGINT)
                if view is not None:
                    view.say([(line, "bold")])
                else:
                    print(f"gputrain: {line}", file=sys.stderr)
            if reader.backlog_bytes:
                continue
            if over:
                return supervisor.returncode
            poll.poll(POLL_MS)
            interrupts.drain()
    finally:
        give_up(supervisor)
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


def conclude(run: Run, returncode: int, state: RunState, *, narrate: bool, environ: Mapping[str, str]) -> int:
    """Say how the run ended; return the command's exit code.

    Raises:
        RequestError: the ranks found the request wrong before they trained; the run directory is removed again.
    """
    status = read_status(run.dir) or run.status
    code = returncode if returncode >= 0 else ExitCode.FAILED
    if code == ExitCode.BAD_REQUEST and state.step == 0:
        shutil.rmtree(run.dir.path, ignore_errors=True)
        raise RequestError(status.message or "the request was wrong")
    colour = use_colour(sys.stderr.isatty(), environ)
    if narrate and all(view.last is not None for view in state.ranks.values()):
        columns = shutil.get_terminal_size().columns
        for line in headless.closing_lines(state, columns):
            print(headless.paint(line, colour=use_colour(sys.stdout.isatty(), environ)))
        sys.stdout.flush()
    for line in _last_words(run, status, state):
        print(headless.paint(line, colour=colour), file=sys.stderr)
    if narrate:
        print(headless.paint([("record ", "dim"), (str(run.dir.path), "")], colour=colour), file=sys.stderr)
    return code


def _last_words(run: Run, status: Status, state: RunState) -> list[list[headless.Piece]]:
    lines: list[list[headless.Piece]] = []
    failure = state.root_cause
    if status.status == "failed" and failure is not None:
        node = next((view.node for view in state.ranks.values() if view.host == failure.host), None) or 0
        log = run.dir.rank_log(failure.rank) if failure.rank is not None else run.dir.node_log(node)
        lines += headless.failure_block(failure, outcome.last_lines(log, LOG_LINES), str(log))
    lines.append(headless.ending(state))
    if status.status == "stopped":
        kept, _, left = (status.message or "").partition("processes left: ")
        lines.append([(printable(kept.rstrip("; ")), "")])
        lines.append([(f"processes left: {left}", "alarm") if left else ("no process of the run is left", "")])
    return lines


def use_colour(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to colour: on a terminal that can, unless ``NO_COLOR`` says otherwise (no-color.org)."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def show(state: RunState, environ: Mapping[str, str]) -> headless.Headless:
    """Return the view that fits this terminal, or the log that stands in its place."""
    terminal = sys.stderr.isatty()
    return headless.Headless(
        state,
        sys.stderr,
        live=terminal and environ.get("TERM") != "dumb",
        colour=use_colour(terminal, environ),
        width=lambda: shutil.get_terminal_size().columns,
    )


def reader_of(run: Run, *, json: bool) -> Reader:
    """Return what reads the run's record, and passes it on where that is asked for."""
    return JsonStream(run, sys.stdout.buffer) if json else RunReader(run.dir)
