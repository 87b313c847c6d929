"""The node agent: starts this node's ranks, stops all when one fails, and attributes the failure.

It never imports torch, except for ``--start-method spawn``, which uses ``torch.multiprocessing``. A rank's report
before its teardown decides about success, not its exit code (pytorch issue 190489).
"""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Literal

from trainer.agent import forkserver
from trainer.agent.assignment import RankAssignment
from trainer.agent.failure_attribution import FailureAttribution
from trainer.agent.local_ranks import LocalRanks
from trainer.agent.node_sampler import SAMPLE_S, NodeSampler, gpus_of
from trainer.agent.scratch import scratch_folder
from trainer.agent.shutdown import Shutdown
from trainer.agent.stack_requests import StackRequests
from trainer.agent.worker_process import WorkerProcess, start_worker
from trainer.contract.errors import print_message
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record import EventWriter, RunDir
from trainer.host.descendants import adopt_orphans, kill_descendants, reap
from trainer.host.process_identity import UnmarkedProcesses
from trainer.host.processes import RUN
from trainer.host.stop_request import LEASE, StopRequest, StopRequested


def run_node(
    assignments: Sequence[RankAssignment],
    *,
    start_method: Literal["forkserver", "spawn"],
    environ: Mapping[str, str],
    target: str,
    preloaded: Sequence[str] = forkserver.PRELOADED,
) -> NodeOutcome:
    """Run the ranks to their end and leave no process behind; ``target`` is the function of a rank, ``module:name``."""
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
        try:
            agent.start(assignments, start_method, target, preloaded)
            agent.watch()
        except StopRequested:
            agent.abandon()
        finally:
            survivors = _kill_leftovers(environ.get(RUN))
            agent.close()
    outcome = agent.outcome(first)
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
        self,
        writer: EventWriter,
        stop_request: StopRequest,
        unmarked: UnmarkedProcesses | None,
        run_dir: RunDir | None,
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
        self._stacks = None if run_dir is None else StackRequests(run_dir, writer)
        self._sampler: NodeSampler | None = None
        """None before the ranks are started, and without a record."""

    # --- starting -------------------------------------------------------------------------------------------------

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
            for assignment in assignments:
                self._start_rank(context, assignment, target)
                if self._attribution.failures:
                    break
        first = assignments[0]
        others = len(assignments) < first.local_world_size
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
            if not running or self._shutdown.act(running, self._attribution.failures, time.monotonic()):
                return
            if self._sampler is not None:
                if self._local_ranks is not None:
                    self._pids.update(self._local_ranks.read())
                self._sampler.poll(time.time())
            if self._stacks is not None:
                self._stacks.poll(running)
            if self._unmarked is not None and time.monotonic() >= self._unmarked_at:
                self._unmarked_at = time.monotonic() + SAMPLE_S
                self._unmarked.update()
            sources: list[object] = [self._stop_request]
            for rank in running:
                sources.append(rank.process.sentinel)
                if not rank.reports.closed:
                    sources.append(rank.reports)
            due_s = [self._shutdown.due_in_s(running), None if self._stacks is None else self._stacks.due_in_s]
            if self._sampler is not None:
                due_s.append(SAMPLE_S)
            wait(sources, timeout=min((each for each in due_s if each is not None), default=None))  # type: ignore[arg-type]
            self._stop_request.drain()
            # Adopted orphans: each zombie counts against the limit of processes until it is reaped.
            reap(forkserver.own_pids().union(rank.process.pid or 0 for rank in self._ranks))

    def _line_of(self, rank: int) -> str:
        """Return the line at which a rank of this agent stays; empty for a rank of another command."""
        return next((each.position.line for each in self._ranks if each.assignment.rank == rank), "")

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def abandon(self) -> None:
        """End the ranks that were started before a stop request interrupted the start."""
        self._shutdown.stopped = True
        self._shutdown.stop(self._ranks)
        self.watch()

    def _collect(self) -> None:
        """Take the ranks' reports, then their exits: a rank that has ended reported before."""
        unknown_exit = 255  # exit code that ``multiprocessing`` assigns to a process whose fork server has ended
        for rank in self._ranks:
            gone = not rank.ended and rank.process.exitcode is not None
            for report in rank.poll_reports():
                if report.line is not None:
                    rank.position.set(report.line)
                    continue
                if report.handles_stack_signal is not None:
                    rank.handles_stack_signal = report.handles_stack_signal
                    continue
                if report.stacks or report.collectives is not None:
                    if self._stacks is not None:
                        self._stacks.take(rank, report)
                    continue
                rank.stoppable |= report.stoppable
                rank.step_s = rank.step_s if report.step_s is None else report.step_s
                self._attribution.not_recorded = report.not_recorded or self._attribution.not_recorded
                rank.stopping |= report.stopping
                if report.stopped:
                    rank.stopped, rank.stopped_at = report, time.monotonic()
                if report.finished and rank.finished_at is None:
                    rank.finished_at, rank.finished_ns = time.monotonic(), report.time_ns
                if report.failure is not None and rank.finished_at is None:
                    rank.failed = True
                    self._attribution.add(report.time_ns, rank.assignment, report.failure)
            if gone:
                rank.ended = True
                rank.exit_code = rank.process.exitcode
                rank.reports.close()
                self._pids.pop(rank.assignment.rank, None)  # the kernel may reuse the pid
                if rank.unreported and self._shutdown.kill_at is None:
                    if rank.exit_code == unknown_exit and self._server_ended(rank):
                        continue
                    if rank.assignment.is_script and rank.exit_code == 0:
                        self._attribution.finish(rank)
                    else:
                        self._attribution.report_death(rank)

    def _server_ended(self, rank: WorkerProcess) -> bool:
        """Return whether the fork server has ended, with which the kernel kills its ranks; record that once."""
        server_exit_s = 1.0  # time-out of the fork server's end after its connections have closed
        ended, number = forkserver.ended(server_exit_s)
        if ended and not self._server_gone:
            self._server_gone = True
            self._attribution.server_ended(rank.assignment.host, number)
        return ended

    def outcome(self, first: RankAssignment) -> NodeOutcome:
        return self._attribution.outcome(first, self._ranks, self._shutdown, self._stop_request.reason or "")


def _torch_context() -> BaseContext:
    """Return torch's spawn context, as fairseq uses it: torch is imported here, and again in every rank."""
    # numpy is no dependency; torch warns of that while it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch.multiprocessing

    context: BaseContext = torch.multiprocessing.get_context("spawn")
    return context
