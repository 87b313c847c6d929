"""Starts this node's ranks, stops all of them when one fails, and says which failure was the cause.

The parent never imports torch, except when ``--start-method spawn`` asks for ``torch.multiprocessing``. What a rank
reported before its teardown decides about success; exit codes do not (pytorch issue 190489).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import msgspec

from trainer.errors import ExitCode
from trainer.node import child, forkserver, guard, memory
from trainer.node.assignment import PipeSink, RankAssignment
from trainer.node.descendants import kill_descendants, reap
from trainer.node.last_words import error_in
from trainer.node.neighbours import Neighbours
from trainer.node.node_sampler import NodeSampler, gpus_of
from trainer.node.scratch import scratch_folder
from trainer.node.stopping_signals import StopRequested, StopSignals
from trainer.outcome import (
    SAVE_S,
    NodeOutcome,
    RankOutcome,
    RankReport,
    exit_code_of,
    is_lost_peer,
    root_cause,
    signal_name,
)
from trainer.record import EventWriter, Failure, RankState, RunDir

GRACE_S = 1.5
"""From SIGTERM to SIGKILL."""
SETTLE_S = 1.0
"""How long the node waits for the cause when a rank says no more than that a peer is gone."""
EXIT_S = 20.0
"""How long a rank's process may take to end after its training is complete."""
GIVE_UP_S = 5.0
"""How long a killed process may take to end; longer is one that the kernel cannot end."""
SAMPLE_S = 1.0
"""Time between two looks at the machine, when a record is kept."""


def run_node(
    assignments: Sequence[RankAssignment],
    *,
    start_method: Literal["forkserver", "spawn"],
    environ: Mapping[str, str],
    target: str = "trainer.rank:run_rank",
    preloaded: Sequence[str] | None = None,
) -> NodeOutcome:
    """Run the ranks to their end and leave no process behind.

    Args:
        assignments: the ranks to start here; how they report is filled in.
        start_method: how to start them.
        environ: the environment, for what a starter says about the lease.
        target: what a rank runs, ``module:function``.
        preloaded: what the fork server imports; default: torch and what ranks of a task need.
    """
    first = assignments[0]
    run_dir = RunDir(first.run_dir) if first.run_dir is not None else None
    writer = EventWriter(run_dir.node_events(first.node) if run_dir else None)
    # Under a launcher that starts the ranks one by one, no process is the parent of the whole node.
    node_dir = run_dir if len(assignments) == first.local_world_size else None
    if node_dir is not None:
        node_dir.node_result(first.node).unlink(missing_ok=True)
    guard.adopt_orphans()
    with StopSignals(environ) as signals, scratch_folder(node_dir, first.node):
        ranks = _Node(writer, signals)
        try:
            ranks.start(assignments, start_method, target, preloaded)
            ranks.watch()
        except StopRequested:
            ranks.abandon()
        finally:
            left = _clear()
            ranks.close()
    outcome = ranks.outcome(first)
    outcome.left = sorted(left)
    if node_dir is not None:
        try:
            outcome.write(node_dir.node_result(first.node))
        except OSError as error:  # a full disk takes nothing from how the ranks ended, which the exit code tells
            print(f"trainer: cannot write {node_dir.node_result(first.node)}: {error.strerror}", file=sys.stderr)
    writer.close()
    return outcome


def _clear() -> set[int]:
    """End what ranks have left, data loading processes and such, and the fork server; return what cannot be ended."""
    tracker = forkserver.tracker_pid()
    left = kill_descendants(keep=() if tracker is None else (tracker,))
    if left and tracker is not None:
        # What the kernel cannot end keeps the tracker waiting for it.
        os.kill(tracker, signal.SIGKILL)
    forkserver.stop()
    reap()
    return left


@dataclass
class _Rank:
    """A rank as its parent sees it."""

    assignment: RankAssignment
    process: BaseProcess
    reports: Connection
    log: Path | None = None
    log_from: int = 0
    """What the log held before this start, in bytes."""
    finished_at: float | None = None
    """When it reported its success, on the monotonic clock."""
    failed: bool = False
    listens: bool = False
    stopping: bool = False
    """Whether it has answered a wish to stop."""
    stopped: RankReport | None = None
    """Its word that it stopped in order."""
    stopped_at: float | None = None
    """When it said so, on the monotonic clock."""
    ended: bool = False
    exit_code: int | None = None

    @property
    def done_at(self) -> float | None:
        """When it said that only its exit is left, on the monotonic clock."""
        return self.finished_at if self.stopped is None else self.stopped_at

    def ask_to_stop(self) -> None:
        """Tell it; a rank that is gone is seen to have ended."""
        with contextlib.suppress(OSError):
            self.reports.send_bytes(b"stop")

    def poll_reports(self) -> list[RankReport]:
        """Return what the rank has said since the last time."""
        found: list[RankReport] = []
        try:
            while not self.reports.closed and self.reports.poll():
                found.append(msgspec.json.decode(self.reports.recv_bytes(), type=RankReport))
        except (EOFError, OSError):
            self.reports.close()
        return found

    def signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if not self.ended and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def outcome(self) -> RankOutcome:
        """Describe how it ended."""
        number = -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None
        return RankOutcome(
            exit_code=self.exit_code if number is None else None,
            signal=None if number is None else signal_name(number),
            finished=self.finished_at is not None,
        )


class _Node:
    """The ranks of this node, from the first to be started to the last to end."""

    def __init__(self, writer: EventWriter, signals: StopSignals) -> None:
        self._writer = writer
        self._signals = signals
        self._ranks: list[_Rank] = []
        self._failures: list[tuple[int, Failure]] = []
        self._kill_at: float | None = None
        """When ranks that were asked to end are killed, on the monotonic clock."""
        self._settle_until: float | None = None
        self._killed_at: float | None = None
        self._stopped = False
        """Whether somebody asked for the end before anything failed."""
        self._answer_until: float | None = None
        """When ranks that were asked to stop and have not answered are killed."""
        self._save_until: float | None = None
        """When ranks that have answered are killed."""
        self._unanswered: list[int] = []
        self._oom_kills = memory.oom_kills()
        self._pids: dict[int, int] = {}
        """Of the ranks that run, for the sampler."""
        self._neighbours: Neighbours | None = None
        """The ranks of this node that other processes have started, as a launcher has it."""
        self._sampler: NodeSampler | None = None
        """Looks at the machine; None while nothing has been started and without a record."""

    # --- starting -------------------------------------------------------------------------------------------------

    def start(
        self,
        assignments: Sequence[RankAssignment],
        start_method: Literal["forkserver", "spawn"],
        target: str,
        preloaded: Sequence[str] | None,
    ) -> None:
        """Start all ranks.

        Raises:
            StopRequested: somebody asked for the end meanwhile.
        """
        # Starting waits until the fork server has loaded torch, which takes seconds.
        self._signals.interrupt(True)
        context = forkserver.start(preloaded) if start_method == "forkserver" else _torch_context()
        for assignment in assignments:
            self._start_rank(context, assignment, target)
            if self._failures:
                break
        self._signals.interrupt(False)
        first = assignments[0]
        others = len(assignments) < first.local_world_size
        if first.run_dir is None or (others and first.local_rank):
            return  # another process of this node looks at the machine
        if others:
            self._neighbours = Neighbours(RunDir(first.run_dir), first.node, first.host, first.local_world_size)
        self._sampler = NodeSampler(
            first.node,
            first.host,
            self._pids,
            writer=self._writer,
            gpus=gpus_of({assignment.rank: assignment.device for assignment in assignments}),
            interval_s=SAMPLE_S,
        )

    def _start_rank(self, context: BaseContext, assignment: RankAssignment, target: str) -> None:
        log = RunDir(assignment.run_dir).rank_log(assignment.rank) if assignment.run_dir is not None else None
        log_from = log.stat().st_size if log is not None and log.exists() else 0
        reports, pipe = context.Pipe(duplex=True)
        sink = PipeSink(pipe)
        told = dataclasses.replace(
            assignment,
            parent_pid=os.getpid(),
            report=sink,
            stop_asked=sink.asked,
            environment={**forkserver.changes(), **assignment.environment},
        )
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=child.enter, args=(target, told), name=f"rank-{assignment.rank}"
        )
        try:
            process.start()
        except (EOFError, ConnectionError):
            self._fail(assignment, "launch", "the fork server ended while it was loading torch; its output says why")
            return
        finally:
            pipe.close()
        self._ranks.append(_Rank(assignment, process, reports, log, log_from))
        assert process.pid is not None
        self._pids[assignment.rank] = process.pid
        self._writer.write(
            RankState(
                time=time.time(),
                rank=assignment.rank,
                state="spawned",
                local_rank=assignment.local_rank,
                node=assignment.node,
                host=assignment.host,
                device=assignment.device,
                pid=process.pid,
            )
        )

    # --- watching -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Wait until every rank has ended, stopping the others as soon as one has failed."""
        self._signals.interrupt(False)
        while True:
            self._collect()
            running = [rank for rank in self._ranks if not rank.ended]
            if not running or self._act(running, time.monotonic()):
                return
            if self._sampler is not None:
                if self._neighbours is not None:
                    self._pids.update(self._neighbours.look())
                self._sampler.poll(time.time())
            sources: list[object] = [self._signals.wake]
            for rank in running:
                sources.append(rank.process.sentinel)
                if not rank.reports.closed:
                    sources.append(rank.reports)
            wait(sources, timeout=self._wait_s(running))  # type: ignore[arg-type]
            self._signals.drain()

    def close(self) -> None:
        """Let go of the GPUs."""
        if self._sampler is not None:
            self._sampler.close()

    def abandon(self) -> None:
        """End what has been started after a stop that came while starting."""
        self._stopped = True
        self.stop()
        self.watch()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End all ranks now; those that a SIGTERM does not end are killed after a grace."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace_s
            for rank in self._ranks:
                rank.signal(signal.SIGTERM)

    def _obey(self, running: list[_Rank], now: float) -> None:
        """Stop because somebody asked for it: in order where every rank can, at once where one cannot or must not."""
        self._stopped = True
        grace_s = running[0].assignment.distributed.stop_grace
        busy = [rank for rank in running if rank.finished_at is None and rank.stopped is None]
        if self._signals.at_once:
            if self._kill_at is not None:
                self._kill_at = min(self._kill_at, now + GRACE_S)
            self.stop()
        elif running[0].assignment.is_script:
            # A script hears a signal or nothing; one that saves on SIGTERM has the time for it.
            if self._kill_at is None:
                for rank in busy:
                    rank.ask_to_stop()
            self.stop(grace_s)
        elif not all(rank.listens for rank in busy):
            self.stop()
        elif self._answer_until is None:
            self._answer_until, self._save_until = now + grace_s, now + grace_s + SAVE_S
            for rank in busy:
                rank.ask_to_stop()
        elif now >= self._answer_until and self._kill_at is None:
            self._unanswered = [rank.assignment.rank for rank in busy if not rank.stopping]
            assert self._save_until is not None
            if self._unanswered or now >= self._save_until:
                self._kill_at = now

    def _collect(self) -> None:
        """Take reports before exits: a rank that reported and ended did so in this order."""
        for rank in self._ranks:
            gone = not rank.ended and rank.process.exitcode is not None
            for report in rank.poll_reports():
                rank.listens |= report.listens
                rank.stopping |= report.stopping
                if report.stopped:
                    rank.stopped, rank.stopped_at = report, time.monotonic()
                if report.finished and rank.finished_at is None:
                    rank.finished_at = time.monotonic()
                if report.failure is not None and rank.finished_at is None:
                    rank.failed = True
                    self._add(report.time_ns, rank.assignment, report.failure)
            if gone:
                rank.ended = True
                rank.exit_code = rank.process.exitcode
                rank.reports.close()
                self._pids.pop(rank.assignment.rank, None)  # the number may be given to another process
                if rank.finished_at is None and rank.stopped is None and not rank.failed and self._kill_at is None:
                    if rank.assignment.is_script and rank.exit_code == 0:
                        self._finish(rank)
                    else:
                        self._report_death(rank)

    def _act(self, running: list[_Rank], now: float) -> bool:
        """Do what is due; True when nothing that is left can be waited for."""
        if self._signals.requested is not None and not self._failures:
            self._obey(running, now)
        elif self._failures and self._kill_at is None:
            if any(failure.kind != "lost_peer" for _, failure in self._failures):
                self.stop()
            elif self._settle_until is None:
                self._settle_until = now + SETTLE_S
            elif now >= self._settle_until:
                self.stop()
        for rank in running:
            if rank.done_at is not None and now >= rank.done_at + EXIT_S:
                rank.signal(signal.SIGKILL)
        if self._kill_at is None or now < self._kill_at:
            return False
        if self._killed_at is None:
            self._killed_at = now
            for rank in running:
                rank.signal(signal.SIGKILL)
        return now >= self._killed_at + GIVE_UP_S

    def _wait_s(self, running: list[_Rank]) -> float | None:
        due = [rank.done_at + EXIT_S for rank in running if rank.done_at is not None]
        due += [moment for moment in (self._kill_at, self._settle_until) if moment is not None]
        answers = (self._answer_until, self._save_until)
        due += [moment for moment in answers if moment is not None and moment > time.monotonic()]
        if self._killed_at is not None:
            due = [self._killed_at + GIVE_UP_S]
        # An exit that is overdue is looked for again and again until it has happened.
        wait_s = max(min(due) - time.monotonic(), 0.05) if due else None
        if self._sampler is not None:
            return SAMPLE_S if wait_s is None else min(wait_s, SAMPLE_S)
        return wait_s

    # --- failures -------------------------------------------------------------------------------------------------

    def _add(self, time_ns: int, assignment: RankAssignment, failure: Failure) -> None:
        kind = failure.kind
        if kind == "exception" and is_lost_peer(failure.message):
            kind = "lost_peer"
        self._failures.append(
            (time_ns, msgspec.structs.replace(failure, kind=kind, rank=assignment.rank, host=assignment.host))
        )

    def _fail(self, assignment: RankAssignment, kind: str, message: str) -> None:
        """Record a failure that the rank could not record itself."""
        now_ns = time.time_ns()
        failure = Failure(time=now_ns / 1e9, kind=kind, message=message, rank=assignment.rank, host=assignment.host)
        self._failures.append((now_ns, failure))
        self._writer.write(failure)
        self._writer.write(
            RankState(
                time=failure.time,
                rank=assignment.rank,
                state="failed",
                local_rank=assignment.local_rank,
                node=assignment.node,
                host=assignment.host,
                device=assignment.device,
                message=message,
            )
        )

    def _finish(self, rank: _Rank) -> None:
        """Record the success of a script that left by ``os._exit(0)`` or became another program."""
        rank.finished_at = time.monotonic()
        here = rank.assignment
        if here.run_dir is not None:
            writer = EventWriter(RunDir(here.run_dir).rank_events(here.rank), rank=here.rank)
            writer.write(RankState(time=time.time(), rank=here.rank, state="finished"))
            writer.close()

    def _report_death(self, rank: _Rank) -> None:
        assert rank.exit_code is not None
        words = error_in(rank.log, since=rank.log_from)
        if rank.exit_code >= 0:
            message = f"the process ended with exit code {rank.exit_code} before its training was complete"
            self._fail(rank.assignment, "exit", f"{message}: {words}" if words else message)
            return
        name = signal_name(-rank.exit_code)
        message = f"the process was ended by {name}"
        if name == "SIGKILL" and memory.oom_kills() > self._oom_kills:
            message += ": the kernel's out-of-memory killer ended a process at that time"
        elif name == "SIGKILL":
            message += ": by hand, by a scheduler, or by a memory limit"
        elif words:
            message += f": {words}"
        self._fail(rank.assignment, "signal", message)

    def outcome(self, first: RankAssignment) -> NodeOutcome:
        """Describe how the node ended."""
        failure = root_cause(self._failures)
        complete = bool(self._ranks) and all(rank.finished_at is not None for rank in self._ranks)
        stopped = [rank.stopped for rank in self._ranks if rank.stopped is not None]
        if (self._stopped or (stopped and failure is None)) and not complete:
            # Ranks that lose their peers while all are being stopped have not failed.
            code, failure = ExitCode.STOPPED, None
        elif failure is not None:
            code = exit_code_of(failure)
        else:
            assert complete
            code = ExitCode.FINISHED
        return NodeOutcome(
            node=first.node,
            host=first.host,
            exit_code=code,
            ranks={rank.assignment.rank: rank.outcome() for rank in self._ranks},
            failure=failure,
            stopped_at=max((report.step for report in stopped if report.step is not None), default=None),
            saved=next((report.saved for report in stopped if report.saved is not None), None),
            unanswered=self._unanswered,
        )


def _torch_context() -> BaseContext:
    """The seeds' way: torch in the parent, and again in every rank."""
    # numpy is no dependency; torch says so while it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch.multiprocessing

    context: BaseContext = torch.multiprocessing.get_context("spawn")
    return context
