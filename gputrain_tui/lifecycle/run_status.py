"""Writes ``status.json`` and ``events/run.ndjson``; an error of the disk does not end the run."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from math import isfinite
from typing import Literal

from gputrain_tui.diagnosis.roll_up import marking_findings
from gputrain_tui.history.plan_file import read_job
from gputrain_tui.history.record_tail import last_test, newest_loss_of
from gputrain_tui.history.status_file import Status, elapsed_of, read_status, write_status
from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.output import log_line
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import run_throughput
from gputrain_tui.state.finding_text import failure_summary, marking
from gputrain_tui.state.newest_metrics import newest_values
from trainer.contract.errors import ExitCode
from trainer.contract.outcome import REQUEUED, RESTARTED, exit_code_of
from trainer.contract.record import Event, Failure, Finding, RunDir, RunEnded, RunStarted, World, encode_event
from trainer.contract.record.regular_file import open_to_append
from trainer.host.boot import BootMoment
from trainer.host.process_identity import identify

METRICS_INTERVAL_S = 5.0
"""Seconds between two writes of the user's own metrics, which change with every step."""

MAX_CAUSE_CHARS = 300
"""Characters to which the cause of a restart is cut: a hang's, with what ended it, is whole."""


class RunStatusWriter:
    """Writer of a run's status and own events; used by its supervisor, or by the holder of its lock."""

    def __init__(self, run_dir: RunDir, plan: Plan, *, now: Callable[[], float] = time.time) -> None:
        self._dir = run_dir
        self._plan = plan
        self._now = now
        self._status = read_status(run_dir) or Status(run=run_dir.path.name, recipe="", world_size=plan.world_size)
        self._world_size = 0
        """Of the state of the run when it was followed last; 0 before."""
        self._metrics_at = 0.0
        """When the user's own metrics were written last, Unix seconds."""
        self._events = -1
        """File descriptor of the run's own events; negative before the first event."""
        self.missing_record = ""
        """Note on missing parts of the record, appended to the final message."""

    @property
    def status(self) -> Status:
        return self._status

    def take_over(self) -> None:
        """Write this process into the status as the run's supervisor, and its state as running."""
        status = self._status
        status.status = "running"
        status.supervisor = identify()
        # Set if a job was requeued.
        status.ended = status.elapsed_s = status.exit_code = status.message = None
        status.failed_rank = status.failed_host = status.failed_step = None
        status.findings = []
        status.lr = status.tokens = status.steps_per_s = status.samples_per_s = status.tokens_per_s = None
        status.mfu = status.noise_scale = None
        self._write_status()

    def started(self) -> None:
        """Write the status and ``run_started``, once the nodes are launched."""
        moment, status = BootMoment.now(), self._status
        if moment is not None and status.started:
            since_s = max(0.0, self._now() - status.started)
            status.started_after_boot = BootMoment(boot_id=moment.boot_id, uptime_s=moment.uptime_s - since_s)
        if read_job(self._dir) is not None:
            status.jobs += 1
        self.take_over()
        self.record(
            RunStarted(
                time=status.started or self._now(),
                run=self._status.run,
                recipe=self._status.recipe,
                world_size=self._plan.world_size,
                run_dir=str(self._dir.path),
            )
        )

    def restarting(self, failure: Failure, *changes: str) -> None:
        """Write into the status and the record that another attempt begins, why, and what changes for it."""
        self._status.restarts += 1
        attempt, where = self._status.restarts, f" on {failure.host}" if failure.host else ""
        cause = (
            f"{failure_summary(failure)}{where}: {textwrap.shorten(failure.message, MAX_CAUSE_CHARS, placeholder=' …')}"
        )
        if where and failure.kind == "node_lost":
            cause = f"{failure.host} lost"
        self.record(
            Finding(
                time=self._now(),
                kind=RESTARTED,
                severity="info",
                host=failure.host,
                cause=failure.kind,
                message="; ".join([f"attempt {attempt} ended: {cause}", *changes, f"attempt {attempt + 1} begins"]),
                evidence={"attempt": float(attempt)},
            )
        )
        self._write_status()

    def change_plan(self, plan: Plan) -> None:
        """Write the number of ranks of the attempt that begins into the status and the record, if it has changed."""
        before, self._plan = self._plan, plan
        if plan.world_size == before.world_size:
            return
        status = self._status
        status.most_ranks = max(status.recorded_ranks, plan.world_size)
        status.world_size = plan.world_size
        self.record(World(time=self._now(), world_size=plan.world_size, attempt=status.restarts + 1))
        self._write_status()

    def stopping(self) -> None:
        self._status.status = "stopping"
        self._write_status()

    def requeued(self, ended: AttemptResult, note: str = "", *, state: RunState | None = None) -> None:
        """Write into the status and the record that the run waits for a scheduler to start it again, why, and how.

        ``state``: after the record of all jobs so far; None if it could not be read.
        """
        kept = attempt_outcome.describe_kept(self._dir, [node.node for node in self._plan.nodes])
        failure = ended.failure
        why = failure.message if failure is not None else " ".join(filter(None, [ended.reason, kept]))
        message = "; ".join(filter(None, [why, note]))
        status = self._status
        status.status, status.supervisor, status.message = "queued", None, message
        self._take_figures(state)
        host = None if failure is None else failure.host
        self.record(Finding(time=self._now(), kind=REQUEUED, severity="info", host=host, message=message))
        self._write_status()

    def record(self, event: Event) -> None:
        line = encode_event(event)
        try:
            # Kept open: a reader of the open file gets the end of the run even if the directory was deleted.
            if self._events < 0:
                self._events = open_to_append(self._dir.run_events)
            while line:
                line = line[os.write(self._events, line) :]
        except OSError as error:
            log_line(f"cannot record {type(event).__name__}: {error.strerror}")

    def follow(self, state: RunState) -> None:
        """Write what lists of runs show while the run goes on into the status if it has changed."""
        valid, status = _valid(state), self._status
        has_changed = self._follow_world(state)
        if valid is not None and valid != status.valid:
            status.valid, has_changed = valid, True
        if (best := state.validations.best) != status.best_valid:
            status.best_valid, has_changed = best, True
        if (change := state.shares.newest) is not None and change.shares != status.shares:
            status.shares, has_changed = change.shares, True
        if self._now() - self._metrics_at >= METRICS_INTERVAL_S and (metrics := _metrics(state)) != status.metrics:
            status.metrics, self._metrics_at, has_changed = metrics, self._now(), True
        if has_changed:
            self._write_status()

    def _follow_world(self, state: RunState) -> bool:
        """Take the number of ranks that a script has started, where it is not that of the plan."""
        before, self._world_size = self._world_size, state.world_size
        status = self._status
        if not before or before == state.world_size or status.world_size == state.world_size:
            return False
        status.most_ranks = max(status.recorded_ranks, state.world_size)
        status.world_size = state.world_size
        return True

    def close(self, ended: AttemptResult, *, left: list[int], state: RunState | None = None) -> ExitCode:
        """Write the end of the run into its events and status; return its exit code.

        ``left`` are processes that could not be killed; ``state`` is None if the record could not be read.
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
            self._status.failed_rank, self._status.failed_host = ended.failure.rank, ended.failure.host
            self._status.failed_step = ended.failure.in_step
        message = "; ".join(filter(None, [message, self.missing_record])) or None
        if left:
            message = "; ".join(filter(None, [message, f"processes left: {', '.join(map(str, left))}"]))
        status = self._status
        status.status, status.exit_code, status.message = ended.status, int(code), message
        now = self._now()
        status.elapsed_s, status.ended = elapsed_of(status, now), now
        self._take_figures(state)
        self.record(
            RunEnded(
                time=status.ended,
                status=ended.status,
                exit_code=int(code),
                message=message,
                elapsed_ms=1e3 * status.elapsed_s,
            )
        )
        self._write_status()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
        return code

    def _take_figures(self, state: RunState | None) -> None:
        """Take the figures of an ended run or job into the status: of the state, or else of the ends of the records."""
        status = self._status
        status.step, status.loss = newest_loss_of(self._dir, status.world_size)
        status.tested = last_test(self._dir)
        if state is None:
            return
        self._follow_world(state)
        if state.step:
            loss = state.figures.loss if state.figures.step == state.step else None  # the record may lack that step
            status.step, status.loss = state.step, loss if loss is not None and isfinite(loss) else None
        elif state.plan is not None:  # resumed, and it has made no step of its own
            status.step = state.plan.first_update or None
        first = state.ranks.get(0)
        status.lr = None if first is None or first.last is None else first.last.lr
        status.tokens = sum(view.totals.tokens for view in (*state.ranks.values(), *state.former.values())) or None
        rates = run_throughput(state.ranks.values())
        status.steps_per_s, status.samples_per_s = rates.steps_per_s, rates.samples_per_s
        status.tokens_per_s, status.mfu = rates.tokens_per_s, rates.mfu
        status.noise_scale = None if state.noise_scale is None else state.noise_scale.samples
        status.metrics = _metrics(state)
        status.findings = marking(marking_findings(state))
        status.valid, status.best_valid = _valid(state), state.validations.best
        status.shares = None if state.shares.newest is None else state.shares.newest.shares

    def warn(self, line: str) -> None:
        """Add a line to the status message of a run that has ended."""
        self._status.message = "; ".join(filter(None, [self._status.message, line]))
        self._write_status()

    def confirm(self, ended: RunEnded) -> None:
        """Write the final status from the ``run_ended`` event of a supervisor that was killed after it."""
        status = self._status
        status.status, status.exit_code, status.message = ended.status, ended.exit_code, ended.message
        status.ended = ended.time
        status.elapsed_s = None if ended.elapsed_ms is None else ended.elapsed_ms / 1e3
        self._take_figures(None)
        self._write_status()

    def _write_status(self) -> None:
        try:
            write_status(self._dir, self._status)
        except OSError as error:
            log_line(f"cannot write {self._dir.status}: {error.strerror}")


def _metrics(state: RunState) -> dict[str, float | Literal["nan"]]:
    values = newest_values(state.metrics, state.validations)
    return {name: value if isfinite(value) else "nan" for name, value in values.items()}


def _valid(state: RunState) -> float | Literal["nan"] | None:
    """Return the newest validation loss as the status has it."""
    newest = state.validations.newest()
    return None if newest is None else newest.loss if isfinite(newest.loss) else "nan"
