"""Writes ``status.json`` and the run's own events; a full disk ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from math import isfinite

from gputrain_tui.history.record_tail import last_test, newest_loss_of
from gputrain_tui.history.status_file import Status, read_status, write_status
from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import run_throughput
from trainer.contract.errors import ExitCode
from trainer.contract.outcome import exit_code_of
from trainer.contract.record import Event, RunDir, RunEnded, RunStarted, encode_event
from trainer.contract.record.regular_file import open_to_append
from trainer.host.process_identity import identify


class RunStatusWriter:
    """Writes the status and the events of a run; for its supervisor alone."""

    def __init__(self, run_dir: RunDir, plan: Plan, *, now: Callable[[], float]) -> None:
        """Continue the status that the directory holds.

        Args:
            run_dir: the run's.
            plan: how many ranks there are.
            now: Unix seconds.
        """
        self._dir = run_dir
        self._plan = plan
        self._now = now
        self._status = read_status(run_dir) or Status(run=run_dir.path.name, recipe="", world_size=plan.world_size)
        self._events = -1
        """Descriptor of the run's own events; negative while nothing has been recorded."""
        self.remark = ""
        """Added to the message of the end: what the record lacks."""

    @property
    def status(self) -> Status:
        """The status as it was last written."""
        return self._status

    def take_over(self) -> None:
        """Record this process as the run's supervisor."""
        self._status.status = "running"
        self._status.supervisor = identify()
        self._status.ended = self._status.exit_code = self._status.message = None  # of a job that was requeued
        self._write_status()

    def started(self) -> None:
        """Record that the nodes are launched."""
        self.take_over()
        self.record(
            RunStarted(
                time=self._now(),
                run=self._status.run,
                recipe=self._status.recipe,
                world_size=self._plan.world_size,
                run_dir=str(self._dir.path),
            )
        )

    def restarting(self) -> None:
        """Record that an attempt has failed and another one follows."""
        self._status.restarts += 1
        self._write_status()

    def stopping(self) -> None:
        """Record that a stop was requested."""
        self._status.status = "stopping"
        self._write_status()

    def record(self, event: Event) -> None:
        """Append to the run's own events."""
        line = encode_event(event)
        try:
            # Held open: a reader that follows the run gets its end also when the directory was deleted meanwhile.
            if self._events < 0:
                self._events = open_to_append(self._dir.run_events)
            while line:
                line = line[os.write(self._events, line) :]
        except OSError as error:
            print(f"cannot record {type(event).__name__}: {error.strerror}", file=sys.stderr, flush=True)

    def validated(self, state: RunState) -> None:
        """Record the newest validation loss, where it is another one."""
        newest = state.last_validation()
        if newest is not None and isfinite(newest.loss) and newest.loss != self._status.valid:
            self._status.valid = newest.loss
            self._write_status()

    def close(self, ended: AttemptResult, *, left: list[int], state: RunState | None = None) -> ExitCode:
        """Write how the run ended; return its exit code.

        Args:
            ended: the result of its last attempt.
            left: processes that do not end.
            state: State after the whole record; None where it could not be read.
        """
        message = None
        if ended.status == "stopped":
            kept = attempt_outcome.describe_kept(self._dir, [node.node for node in self._plan.nodes])
            message = " ".join(filter(None, [ended.reason, kept]))
        code = ExitCode.STOPPED if ended.status == "stopped" else ExitCode.FINISHED
        if ended.failure is not None:
            if not ended.recorded:
                self.record(ended.failure)
            message, code = ended.failure.message, exit_code_of(ended.failure)
        message = "; ".join(filter(None, [message, self.remark])) or None
        if left:
            message = "; ".join(filter(None, [message, f"processes left: {', '.join(map(str, left))}"]))
        status = self._status
        status.status, status.exit_code, status.message = ended.status, int(code), message
        status.ended = self._now()
        status.step, status.loss = newest_loss_of(self._dir, self._plan.world_size)
        status.tested = last_test(self._dir)
        if state is not None:
            first = state.ranks.get(0)
            status.lr = None if first is None or first.last is None else first.last.lr
            status.tokens = sum(view.totals.tokens for view in state.ranks.values()) or None
            rates = run_throughput(state.ranks.values())
            status.samples_per_s, status.tokens_per_s, status.mfu = rates.samples_per_s, rates.tokens_per_s, rates.mfu
            newest = state.last_validation()
            status.valid = newest.loss if newest is not None and isfinite(newest.loss) else None
        self.record(RunEnded(time=status.ended, status=ended.status, exit_code=int(code), message=message))
        self._write_status()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
        return code

    def warn(self, line: str) -> None:
        """Add a line to the message of a run that has ended."""
        self._status.message = "; ".join(filter(None, [self._status.message, line]))
        self._write_status()

    def confirm(self, ended: RunEnded) -> None:
        """Write the status from the last event, after which the supervisor was killed."""
        status = self._status
        status.status, status.exit_code, status.message = ended.status, ended.exit_code, ended.message
        status.ended = ended.time
        self._write_status()

    def _write_status(self) -> None:
        try:
            write_status(self._dir, self._status)
        except OSError as error:
            print(f"cannot write {self._dir.status}: {error.strerror}", file=sys.stderr, flush=True)
