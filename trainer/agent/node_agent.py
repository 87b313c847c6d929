"""The node agent: starts this node's ranks, stops all when one fails, and attributes the failure.

It never imports torch, except for ``--start-method spawn``, which uses ``torch.multiprocessing``. A rank's report
before its teardown decides about success, not its exit code (pytorch issue 190489).
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Literal

from trainer.agent import forkserver
from trainer.agent.assignment import RankAssignment
from trainer.agent.failure_attribution import FailureAttribution
from trainer.agent.first_node import CHECK_S, FirstNode
from trainer.agent.local_ranks import LocalRanks
from trainer.agent.node_sampler import SAMPLE_S, NodeSampler, gpus_of
from trainer.agent.scratch import scratch_folder
from trainer.agent.shutdown import Shutdown
from trainer.agent.stack_requests import StackRequests
from trainer.agent.started_ranks import StartedRanks
from trainer.agent.worker_process import WorkerProcess, start_worker
from trainer.contract.errors import ExitCode, print_message
from trainer.contract.outcome import NodeOutcome, RankOutcome, RankReport
from trainer.contract.record import EventWriter, Failure, RunDir
from trainer.host.descendants import adopt_orphans, kill_descendants, reap
from trainer.host.process_identity import UnmarkedProcesses
from trainer.host.processes import RUN
from trainer.host.stop_request import LEASE, OWN_SIGNAL_S, STOP_CODES, StopRequest, StopRequested
from trainer.host.versions import installed_versions


def run_node(
    assignments: Sequence[RankAssignment],
    *,
    start_method: Literal["forkserver", "spawn"],
    environ: Mapping[str, str],
    target: str,
    preloaded: Sequence[str] = forkserver.PRELOADED,
    follows_started: bool = False,
) -> NodeOutcome:
    """Run the ranks to their end and leave no process behind.

    Args:
        assignments: the ranks; of a script that must start them, only the first process is started.
        start_method: how processes are started.
        environ: environment of the command.
        target: function of a rank, ``module:name``.
        preloaded: modules that the fork server imports.
        follows_started: whether processes that a script starts become ranks when they join a process group.
    """
    first = assignments[0]
    run_dir = RunDir(first.run_dir) if first.run_dir is not None else None
    writer = EventWriter(run_dir.node_events(first.node) if run_dir else None)
    # Under a launcher that starts each rank as a separate command, no process is the agent of the whole node.
    node_dir = run_dir if len(assignments) == first.local_world_size else None
    if node_dir is not None:
        NodeOutcome.reserve(node_dir.node_result(first.node), ranks=len(assignments))
    adopt_orphans()
    with (
        StopRequest(lease=environ.get(LEASE) == "stdin") as stop_request,
        _woken_by_children(),
        scratch_folder(node_dir, first.node) as folder,
    ):
        unmarked = UnmarkedProcesses(folder) if folder is not None and environ.get(RUN) else None
        agent = _NodeAgent(writer, stop_request, unmarked, run_dir)
        if node_dir is not None and first.node and not environ.get(RUN):  # without a supervisor, which ends all nodes
            agent.first_node = FirstNode(node_dir, first.node)
        launched = assignments[:1] if first.must_start_ranks else assignments
        try:
            if follows_started and folder is not None:
                launched = agent.follow_started(folder, assignments, launched)
            agent.start(launched, start_method, target, preloaded)
            agent.watch()
        except StopRequested:
            agent.abandon()
        finally:
            survivors = _kill_leftovers(environ.get(RUN))
            agent.close()
    outcome = agent.outcome(assignments)
    outcome.left = sorted(survivors)
    if node_dir is not None:
        try:
            outcome.write(node_dir.node_result(first.node))
        except OSError as error:  # on a full disk only the exit code shows the outcome
            print_message(f"cannot write {node_dir.node_result(first.node)}: {error.strerror}", program="trainer")
    writer.close()
    return outcome


@contextlib.contextmanager
def _woken_by_children() -> Iterator[None]:
    """Make the stop request's descriptor readable at the end of each child."""
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _kill_leftovers(run: str | None) -> set[int]:
    """Kill the fork server and all processes of ended ranks, such as data loading ones; return the survivors' pids."""
    tracker = forkserver.tracker_pid()
    survivors = kill_descendants(run=run, keep=() if tracker is None else (tracker,), unreaped=forkserver.own_pids())
    forkserver.stop()
    reap()
    return survivors


class _NodeAgent:
    """Agent of the ranks of this node, from the start of the first to the end of the last."""

    def __init__(
        self, writer: EventWriter, stop_request: StopRequest, unmarked: UnmarkedProcesses | None, run_dir: RunDir | None
    ) -> None:
        self._writer = writer
        self._unmarked = unmarked
        self._unmarked_at = 0.0
        """Time of the next update of the list of unmarked processes, on the monotonic clock."""
        self._stop_request = stop_request
        self._ranks: list[WorkerProcess] = []
        self._attribution = FailureAttribution(writer)
        self._shutdown = Shutdown(stop_request)
        self._pids: dict[int, int] = {}
        """Rank to process id, of running ranks; for the sampler."""
        self._local_ranks: LocalRanks | None = None
        """All ranks of this node, if a launcher starts each as a separate command; else None."""
        self._server_gone = False
        """Whether the fork server ended before its ranks."""
        self.first_node: FirstNode | None = None
        """Node 0, if its failure is to end this one."""
        self._stacks = None if run_dir is None else StackRequests(run_dir, writer)
        self._sampler: NodeSampler | None = None
        """None before the ranks are started, and without a record."""
        self._started: StartedRanks | None = None
        """Ranks that the script starts; None where it is not measured."""

    # --- starting -------------------------------------------------------------------------------------------------

    def follow_started(
        self, folder: Path, planned: Sequence[RankAssignment], launched: Sequence[RankAssignment]
    ) -> list[RankAssignment]:
        """Make processes that scripts start ranks; return the assignments to launch, with the socket for these."""
        self._started = StartedRanks(folder, planned, processes=len(launched), writer=self._writer, pids=self._pids)
        address = str(self._started.address)
        return [dataclasses.replace(each, started_ranks_socket=address) for each in launched]

    def start(
        self,
        assignments: Sequence[RankAssignment],
        start_method: Literal["forkserver", "spawn"],
        target: str,
        preloaded: Sequence[str],
    ) -> None:
        """Start all ranks.

        Raises:
            StopRequested: a stop request interrupted the start.
        """
        # The start blocks until the fork server has loaded torch, which takes seconds.
        with self._stop_request.raising():
            context = forkserver.start(preloaded) if start_method == "forkserver" else _torch_context()
            installed_versions()  # of the first event, read while the server loads torch
            for assignment in assignments:
                self._start_rank(context, assignment, target)
                if self._attribution.failures:
                    break
        first = assignments[0]
        others = len(assignments) < first.local_world_size and not first.must_start_ranks
        if first.run_dir is None or (others and first.local_rank):
            return  # another process samples this node
        if others:
            self._local_ranks = LocalRanks(RunDir(first.run_dir), first.node, first.host, first.local_world_size)
        self._sampler = NodeSampler(
            first.node,
            first.host,
            self._pids,
            writer=self._writer,
            gpus=gpus_of({assignment.rank: assignment.device for assignment in assignments}),
            run_dir=RunDir(first.run_dir),
            line_of=self._line_of,
        )

    def _start_rank(self, context: BaseContext, assignment: RankAssignment, target: str) -> None:
        rank = start_worker(context, assignment, target)
        if rank is None:
            message = "the fork server ended while it was loading torch; see its output for the cause"
            self._attribution.fail(assignment, "launch", message)
            return
        self._ranks.append(rank)
        assert rank.process.pid is not None
        self._pids[assignment.rank] = rank.process.pid
        self._writer.write(assignment.state("spawned", pid=rank.process.pid))

    # --- watching -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Wait until every rank has ended; stop the others as soon as one has failed."""
        while True:
            self._collect()
            running = [rank for rank in self._ranks if not rank.ended]
            self._follow_first_node(running)
            # Those of a script that has ended by itself are left over; at a stop they have the time to save.
            if self._started is not None and (running or self._shutdown.stopped):
                running += self._started.living
            if not running or self._shutdown.act(running, self._attribution.failures, time.monotonic()):
                return
            if self._sampler is not None:
                if self._local_ranks is not None:
                    self._pids.update(self._local_ranks.read())
                self._sampler.poll(time.time())
            if self._stacks is not None:
                displaced = [rank for rank in running if self._is_displaced(rank)]
                self._stacks.poll(rank for rank in running if rank not in displaced)
            if self._unmarked is not None and time.monotonic() >= self._unmarked_at:
                self._unmarked_at = time.monotonic() + SAMPLE_S
                self._unmarked.update()
            sources: list[object] = [self._stop_request]
            if self._started is not None:
                sources += self._started.sources
            for rank in running:
                if rank.by_script:
                    continue
                sources.append(rank.process.sentinel)
                if not rank.reports.closed:
                    sources.append(rank.reports)
            due_s = [self._shutdown.due_in_s(running), None if self._stacks is None else self._stacks.due_in_s]
            if self._sampler is not None:
                due_s.append(SAMPLE_S)
            if self.first_node is not None:
                due_s.append(CHECK_S)
            wait(sources, timeout=min((each for each in due_s if each is not None), default=None))  # type: ignore[arg-type]
            self._stop_request.drain()
            # Adopted orphans: each zombie counts against the limit of processes until it is reaped.
            reap(forkserver.own_pids().union(rank.process.pid or 0 for rank in self._ranks))

    def _follow_first_node(self, running: Sequence[WorkerProcess]) -> None:
        """End the ranks that go on though node 0 has failed."""
        if self.first_node is None or not running or self._attribution.failures or self._shutdown.stopped:
            return
        if why := self.first_node.failure(time.monotonic()):
            self._attribution.fail(running[0].assignment, "lost_peer", why)

    def _is_displaced(self, rank: WorkerProcess) -> bool:
        """Whether processes that a script's process has started are the ranks in its place."""
        started = self._started
        return started is not None and not rank.by_script and bool(started.living) and started.has_displaced(rank)

    def _line_of(self, rank: int) -> str:
        """Return the line at which a rank of this agent stays; empty for a rank of another command."""
        if self._started is not None and rank in self._started.ranks:
            return self._started.ranks[rank].position.line
        return next((each.position.line for each in self._ranks if each.assignment.rank == rank), "")

    def close(self) -> None:
        if self._started is not None:
            self._started.close()
        if self._sampler is not None:
            self._sampler.close()

    def abandon(self) -> None:
        """End the ranks that were started before a stop request interrupted the start."""
        self._shutdown.stopped = True
        self._shutdown.stop(self._ranks)
        self.watch()

    def _collect(self) -> None:
        """Take the ranks' reports, then their exits: a rank that has ended reported before."""
        self._attribution.observe_groups(self._ranks)
        unknown_exit = 255  # exit code that ``multiprocessing`` assigns to a process whose fork server has ended
        self._collect_started()
        for rank in self._ranks:
            gone = not rank.ended and rank.process.exitcode is not None
            for report in rank.poll_reports():
                self._take(rank, report)
            if gone:
                rank.ended = True
                rank.exit_code = rank.process.exitcode
                rank.reports.close()
                if self._pids.get(rank.assignment.rank) == rank.process.pid:  # the kernel may reuse the pid
                    del self._pids[rank.assignment.rank]
                if rank.unreported and self._shutdown.kill_at is None:
                    if rank.exit_code == unknown_exit and self._server_ended(rank):
                        continue
                    self._end_unreported(rank)

    def _collect_started(self) -> None:
        """Take the reports of the ranks that the script has started, and their ends."""
        if self._started is None:
            return
        self._started.accept(self._ranks)
        for rank in self._started.living:
            gone = rank.process.exitcode is not None
            for report in rank.poll_reports():
                self._take(rank, report)
            if gone:
                self._started.end(rank)
        if not self._attribution.failures and not self._shutdown.stopped:
            self._attribution.failures += self._started.lasting_failures()

    def _take(self, rank: WorkerProcess, report: RankReport) -> None:
        """Take the report of a rank."""
        if report.line is not None:
            rank.position.set(report.line)
            return
        if report.handles_stack_signal is not None:
            rank.handles_stack_signal = report.handles_stack_signal
            return
        if report.stacks or report.collectives is not None:
            if self._stacks is not None:
                self._stacks.take(rank, report)
            return
        rank.stoppable |= report.stoppable
        rank.step_s = rank.step_s if report.step_s is None else report.step_s
        self._attribution.not_recorded = report.not_recorded or self._attribution.not_recorded
        rank.stopping |= report.stopping
        if self._started is not None and not rank.by_script:
            self._started.note(rank, report)
        if report.stopped:
            rank.stopped, rank.stopped_at = report, time.monotonic()
        if report.finished and rank.finished_at is None:
            rank.finished_at, rank.finished_ns = time.monotonic(), report.time_ns
            if not rank.by_script:
                self._attribute(rank, None, report)
        if report.failure is not None and rank.finished_at is None and not rank.failed:
            rank.failed = True
            if self._started is not None and rank.by_script:
                self._started.fail(rank, report)
            else:
                self._attribute(rank, report.failure, report)

    def _end_unreported(self, rank: WorkerProcess) -> None:
        """Record the end of a process that has reported none."""
        started, code = self._started, rank.exit_code
        succeeded = rank.assignment.is_script and code == 0
        if started is not None and started.has_displaced(rank):
            failure = None if succeeded else rank.assignment.failure("exit", f"the script's process ended with {code}")
            if causes := started.causes(failure):
                self._add_causes(causes)
                return
            if succeeded:
                started.finish()
                rank.finished_at, rank.finished_ns = time.monotonic(), time.time_ns()
                return
        if succeeded:
            self._attribution.finish(rank)
        elif code in STOP_CODES and not self._attribution.failures and self._stop_request.await_request(OWN_SIGNAL_S):
            self._shutdown.stopped = True  # a scheduler signals all processes of a job, in no order
        else:
            self._attribution.report_death(rank)

    def _add_causes(self, causes: Sequence[tuple[int, Failure]]) -> None:
        """Add the failures of ranks that the script has started."""
        assert self._started is not None
        for time_ns, cause in causes:
            self._attribution.add(time_ns, self._started.ranks[cause.rank or 0].assignment, cause)

    def _attribute(self, rank: WorkerProcess, failure: Failure | None, report: RankReport) -> None:
        """Attribute the end of a script's process to the ranks that it has started, or its failure to itself."""
        started = self._started
        if started is not None and started.has_displaced(rank) and not self._shutdown.stopped:
            self._collect_started()  # their reports were sent before
            if causes := started.causes(failure, report.lost_pid):
                rank.failed, rank.finished_at = True, None
                self._add_causes(causes)
                return
            if failure is None:
                started.finish()
            else:
                self._writer.write(failure)
                self._writer.write(rank.assignment.state("failed", message=failure.message))
        if failure is not None:
            self._attribution.add(report.time_ns, rank.assignment, failure)

    def _server_ended(self, rank: WorkerProcess) -> bool:
        """Return whether the fork server has ended, with which the kernel kills its ranks; record that once."""
        server_exit_s = 1.0  # time-out of the fork server's end after its connections have closed
        ended, number = forkserver.ended(server_exit_s)
        if ended and not self._server_gone:
            self._server_gone = True
            self._attribution.server_ended(rank.assignment.host, number)
        return ended

    def outcome(self, assignments: Sequence[RankAssignment]) -> NodeOutcome:
        """Return the outcome of the node, whose ranks by the plan these are."""
        reason = self._stop_request.reason or ""
        outcome = self._attribution.outcome(assignments[0], self._ranks, self._shutdown, reason)
        finished = outcome.exit_code == ExitCode.FINISHED
        started = () if self._started is None else self._started.ranks
        for rank in {*started, *(each.rank for each in assignments)} - outcome.ranks.keys():
            outcome.ranks[rank] = RankOutcome(finished=finished)
        return outcome


def _torch_context() -> BaseContext:
    """Return torch's spawn context, as fairseq uses it: torch is imported here, and again in every rank."""
    # numpy is no dependency; torch warns of that while it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch.multiprocessing

    context: BaseContext = torch.multiprocessing.get_context("spawn")
    return context
