"""The in-process agent: runs a rank in this process, under a launcher or, typed by hand, as the node's only rank.

There is no other process to watch it, so a thread follows the stop request, even while the rank is in C++.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from trainer.agent import code_position, worker_entry
from trainer.agent.assignment import RankAssignment
from trainer.agent.code_position import CodePosition, stacks
from trainer.agent.first_node import CHECK_S, FirstNode
from trainer.agent.local_ranks import LocalRanks
from trainer.agent.native_stacks import read_native_stacks
from trainer.agent.node_sampler import SAMPLE_S, NodeSampler, gpus_of
from trainer.agent.printed_stacks import POLL_S, LoaderWorkers
from trainer.agent.scratch import scratch_folder
from trainer.contract.errors import ExitCode, message_line
from trainer.contract.outcome import (
    SAVE_TIMEOUT_S,
    NodeOutcome,
    RankOutcome,
    RankReport,
    answer_s,
    describe_stop,
    exit_code_of,
)
from trainer.contract.record import NATIVE, EventWriter, Failure, RankStacks, RunDir, read_stack_request
from trainer.contract.record.code_stacks import waits_for_worker
from trainer.contract.stop_level import StopLevel
from trainer.host import process_guard
from trainer.host.descendants import adopt_orphans, kill_descendants
from trainer.host.processes import RUN
from trainer.host.stop_request import LEASE, StopRequest
from trainer.host.temporary_folder import delete_temporary_folders


def run_in_process(assignment: RankAssignment, *, environ: Mapping[str, str], target: str) -> int:
    """Run the rank, ``module:function``, to its end in this process and return its exit code."""
    run_dir = RunDir(assignment.run_dir) if assignment.run_dir is not None else None
    process_guard.print_stacks_on_signal()
    process_guard.print_stacks_of_forks()
    adopt_orphans()
    node_dir = run_dir if assignment.local_world_size == 1 else None
    with (
        StopRequest(lease=environ.get(LEASE) == "stdin", main_thread_is_free=False) as stop_request,
        scratch_folder(node_dir, assignment.node),
    ):
        agent = _InProcessAgent(assignment, node_dir, stop_request)
        threading.Thread(target=agent.follow_stop_request, name="stop-request", daemon=True).start()
        if run_dir is not None:
            if node_dir is not None:
                NodeOutcome.reserve(node_dir.node_result(assignment.node), ranks=1)
                if assignment.node and not environ.get(RUN):  # without a supervisor, which ends all nodes
                    first = FirstNode(node_dir, assignment.node)
                    threading.Thread(
                        target=agent.follow_first_node, args=(first,), name="first-node", daemon=True
                    ).start()
            spawned = EventWriter(run_dir.node_events(assignment.node), shared=True)
            spawned.write(assignment.state("spawned", pid=os.getpid()))
            spawned.close()
            if assignment.local_rank == 0:
                threading.Thread(target=agent.sample_node, args=(run_dir,), name="node-sampler", daemon=True).start()
            threading.Thread(
                target=agent.answer_stack_requests, args=(run_dir,), name="stack-requests", daemon=True
            ).start()
            terminal = None if assignment.terminal is None else os.dup(assignment.terminal)
            assignment = dataclasses.replace(assignment, terminal=terminal)
            process_guard.redirect_output(run_dir.rank_log(assignment.rank))
        # Import torch as a fork server does for its ranks.
        importlib.import_module("trainer.agent.preload_torch")
        code = worker_entry.run(
            target, dataclasses.replace(assignment, report=agent.report, stop_requested=agent.stop_requested)
        )
        code = agent.exit_code(code)
    # torch's DataLoader raises in its handler when one of its workers is killed, as by the next line.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_descendants(run=environ.get(RUN))
    return code


class _InProcessAgent:
    """Agent of the rank in this process: its stop request, reports, outcome and node samples."""

    def __init__(self, assignment: RankAssignment, node_dir: RunDir | None, stop_request: StopRequest) -> None:
        self._assignment = assignment
        self._node_dir = node_dir
        """Run directory, if this rank is the node's only one."""
        self._stop_request = stop_request
        self._terminal = os.dup(2)
        """Standard error as it was before the rank's log took its place."""
        self._not_recorded = ""
        """Reason why the end of the rank's record is not on disk; empty if it is."""
        self._reported: ExitCode | None = None
        """Exit code by the rank's report; None before it."""
        self._over = threading.Event()
        """Set when the rank has reported its end; ends the sampling."""
        self._position = CodePosition()
        self._stoppable = False
        self._grace_s = assignment.distributed.stop_grace
        """Seconds that the rank has after a stop request."""
        self._leave_at: float | None = None
        """Time at which the process exits after a stop request, on the monotonic clock."""

    def sample_node(self, run_dir: RunDir) -> None:
        """Sample this node once a second; runs on its own thread.

        The thread sleeps nearly all of the time, and holds the GIL for less than a thousandth of it. Each machine has
        its own file: on a network file system, lines of several writers would mix.
        """
        assignment = self._assignment
        local_ranks = LocalRanks(run_dir, assignment.node, assignment.host, assignment.local_world_size)
        writer = EventWriter(run_dir.events / f"machine-{assignment.host}.ndjson")
        sampler = NodeSampler(
            assignment.node,
            assignment.host,
            local_ranks.pids,
            writer=writer,
            run_dir=run_dir,
            line_of=lambda rank: self._position.line if rank == assignment.rank else "",
        )
        gpus_known = False
        while not self._over.wait(SAMPLE_S):
            local_ranks.read()
            if local_ranks.complete and not gpus_known:
                sampler.watch_gpus(gpus_of(local_ranks.devices))
                gpus_known = True
            sampler.poll(time.time())

    def answer_stack_requests(self, run_dir: RunDir) -> None:
        """Record the stacks of the rank at each request; runs on its own thread."""
        assignment, main = self._assignment, threading.main_thread().ident or 0
        before = read_stack_request(run_dir)
        while not self._over.wait(SAMPLE_S):
            request = read_stack_request(run_dir)
            if request and request != before:
                before = request
                answer = RankStacks(
                    time=time.time(),
                    rank=assignment.rank,
                    host=assignment.host,
                    request=request,
                    pid=os.getpid(),
                    threads=stacks(main),
                    collectives=code_position.collectives(),
                )
                if waits_for_worker(answer.threads[0].frames):
                    workers = LoaderWorkers(os.getpid())
                    while not workers.poll():
                        time.sleep(POLL_S)
                    answer.workers = workers.stacks
                if request.endswith(NATIVE):
                    answer.native, answer.native_problem = read_native_stacks(os.getpid())
                writer = EventWriter(run_dir.node_events(assignment.node), shared=True)
                writer.write(answer)
                writer.close()

    def follow_first_node(self, first: FirstNode) -> None:
        """End the process if it goes on though node 0 has failed; runs on its own thread."""
        while not self._over.wait(CHECK_S):
            if not (why := first.failure(time.monotonic())):
                continue
            failure = self._assignment.failure("lost_peer", why)
            writer = EventWriter(first.run_dir.node_events(self._assignment.node), shared=True)
            writer.write(failure)
            writer.write(self._assignment.state("failed", message=why))
            writer.close()
            self._write_outcome(ExitCode.FAILED, failure=failure)
            self._exit(ExitCode.FAILED)

    def report(self, report: RankReport) -> None:
        """Take the rank's report; called before its teardown, which may never return."""
        if report.line is not None:
            self._position.set(report.line)
            return
        if report.handles_stack_signal is not None or report.collectives is not None:
            return
        self._stoppable |= report.stoppable
        if report.step_s is not None:
            if self._leave_at is None:
                self._grace_s = answer_s(self._assignment.distributed.stop_grace, report.step_s)
            return
        if report.stopping:
            self._grace_s = SAVE_TIMEOUT_S
            if self._leave_at is not None:
                self._leave_at = time.monotonic() + SAVE_TIMEOUT_S
        self._not_recorded = report.not_recorded
        if report.stopped:
            self._write_outcome(ExitCode.STOPPED, stopped=report)
        elif report.finished:
            self._write_outcome(ExitCode.FINISHED, finished=True)
        elif report.failure is not None and self._stop_request.level and report.failure.kind == "lost_peer":
            # A rank that loses its peers while all are being stopped has not failed.
            self._write_outcome(ExitCode.STOPPED)
        elif report.failure is not None:
            self._write_outcome(exit_code_of(report.failure), failure=report.failure)

    def exit_code(self, code: int) -> int:
        """Return the exit code by the rank's report; without a report, record a failure and return ``code``."""
        if self._reported is not None:
            return self._reported
        message = f"the rank ended with exit code {code} before its training was complete"
        self._write_outcome(ExitCode.FAILED, failure=self._assignment.failure("exit", message))
        return code

    def stop_requested(self) -> bool:
        return self._leave_at is not None

    def follow_stop_request(self) -> None:
        """End the process on a stop request, after the time that a rank has to save; runs on its own thread."""
        while True:
            now, level = time.monotonic(), self._stop_request.level
            if level and self._leave_at is None:
                self._leave_at = now + self._grace_s if self._stoppable else now
            if level > StopLevel.SAVE or (self._leave_at is not None and now >= self._leave_at):
                self._leave()
            try:
                self._stop_request.wait(None if self._leave_at is None else self._leave_at - now)
            except (OSError, ValueError):  # the rank has ended, and the request's descriptors are closed
                return

    def _leave(self) -> NoReturn:
        if self._reported is None:
            self._write_outcome(ExitCode.STOPPED)
        self._exit(ExitCode.STOPPED)

    def _exit(self, code: ExitCode) -> NoReturn:
        time.sleep(0.15)  # a little more than ``EventWriter.interval_s``
        kill_descendants(run=os.environ.get(RUN), timeout_s=1.0)
        if self._node_dir is not None:
            delete_temporary_folders(self._node_dir.path, [self._assignment.node])
        os._exit(code)

    def _write_outcome(
        self,
        code: ExitCode,
        *,
        finished: bool = False,
        failure: Failure | None = None,
        stopped: RankReport | None = None,
    ) -> None:
        """Print the end of the rank, and write the node's outcome if this rank is the node's only one."""
        self._reported = code
        self._over.set()
        assignment = self._assignment
        if code == ExitCode.STOPPED:
            self._print_message(
                "stopped" if stopped is None else describe_stop(stopped.step, stopped.saved, stopped.not_kept)
            )
        if failure is not None:
            self._print_message(f"rank {assignment.rank} on {assignment.host}: {failure.message}")
        if self._node_dir is not None:
            stop = stopped or RankReport()
            node = NodeOutcome(
                node=assignment.node,
                host=assignment.host,
                exit_code=code,
                ranks={assignment.rank: RankOutcome(exit_code=code, finished=finished)},
                failure=failure,
                stopped_at=stop.step,
                saved=stop.saved,
                not_kept=stop.not_kept,
                stop_reason=self._stop_request.reason or "",
                not_recorded=self._not_recorded,
            )
            with contextlib.suppress(OSError):  # on a full disk only the exit code shows the outcome
                node.write(self._node_dir.node_result(assignment.node))

    def _print_message(self, text: str) -> None:
        line = message_line(text, program="trainer") + "\n"
        with contextlib.suppress(OSError):  # the terminal may be gone, which may be why the rank ends
            os.write(self._terminal, line.encode(errors="backslashreplace"))
