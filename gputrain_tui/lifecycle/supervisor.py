"""Supervisor of one run: launches the nodes of its plan, watches, restarts or stops them, and records the end.

``python -m gputrain_tui.lifecycle.supervisor RUN_DIR [--lease] [--adopt [--restart]]``. It never imports torch, so that
it starts fast. Only its main thread starts node agents, as they may end with the thread that started them
(``PR_SET_PDEATHSIG``). ``--lease``: the run is saved and ends with standard input. ``--adopt``: it takes over a run,
with ``--restart`` to go on as its recipe says, without to end it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.hosts.host_names import CHANNELS
from gputrain_tui.lifecycle import attempt_outcome, leftovers, run_end
from gputrain_tui.lifecycle.attempt import AttemptResult, failed, read_attempt, with_note
from gputrain_tui.lifecycle.diagnosis_watch import RunDiagnosis
from gputrain_tui.lifecycle.directory_watch import SILENT_S, DirectoryWatch, silence_findings
from gputrain_tui.lifecycle.launchers import Launcher, launcher
from gputrain_tui.lifecycle.network_watch import NetworkWatch
from gputrain_tui.lifecycle.node_group import NodeGroup
from gputrain_tui.lifecycle.record_gap_watch import RecordGaps
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.lifecycle.successor import SUCCESSOR_DELAY_S, Successor
from gputrain_tui.plan.planner import Plan
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.record import Finding, RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.host.descendants import adopt_orphans, kill_descendants, reap
from trainer.host.processes import SUPERVISOR
from trainer.host.stop_request import StopRequest
from trainer.host.temporary_folder import delete_temporary_folders, system_folder

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.next_attempt import NextAttempt
    from gputrain_tui.lifecycle.report_sinks import ReportSinks

LOCK_TIMEOUT_S = 1.0
"""Time for an adopting supervisor to get the lock, which a process that was being forked may hold for a moment."""


class Supervisor:
    """Supervisor of one plan: its attempts, its stop and the record of both."""

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan,
        node_launcher: Launcher,
        *,
        leased: bool,
        adopting: bool = False,
        may_restart: bool = True,
    ) -> None:
        self.dir = run_dir
        self.leased = leased
        self._adopting = adopting
        self._may_restart = may_restart
        self._stop_request = StopRequest(lease=leased, saves_without_lease=True)
        self._poll = select.poll()
        self._plan = plan
        self._launcher = node_launcher
        self._status_writer = RunStatusWriter(run_dir, self._plan)
        self._tmp = system_folder()
        self._diagnosis = RunDiagnosis(run_dir)
        self._network = NetworkWatch(node_launcher)
        self._directory = DirectoryWatch(run_dir, self._stop_request)
        self._gaps = RecordGaps(run_dir, plan)
        self._report: ReportSinks | None = None
        needs_successor = may_restart and not leased and node_launcher.has_successor
        self._successor = Successor(
            run_dir.path, delay_s=(SUCCESSOR_DELAY_S if adopting else 0.0) if needs_successor else math.inf
        )

    def run(self) -> ExitCode:
        """Supervise the run to its end; return its exit code."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes the poll
        self._stop_request.catch()
        self._poll.register(self._stop_request, select.POLLIN)
        adopt_orphans()
        try:
            ended = self._run_attempts()
        except BaseException as error:  # clean up and record the error before raising it
            left = self._sweep()
            message = f"the supervisor failed: {type(error).__name__}: {error}"
            self._close(failed("launch", message), left)
            raise
        else:
            left = self._sweep()
            return self._close(self._launcher.explain(ended, self._plan, self.dir), left)
        finally:
            self._successor.dismiss()

    def _run_attempts(self) -> AttemptResult:
        if self._adopting:
            nodes = self._adopt()
        else:
            try:
                self._plan = self._launcher.place(self._plan, self.dir)
            except RequestError as error:
                return failed("request", str(error))
            nodes = self._launch(self._plan)
            self._status_writer.started()  # after the launch, so that it does not delay the first step
            nodes.write()
            self._begin_report()
        next_attempt: NextAttempt | None = None
        while True:
            self._watch(nodes)
            ended = self._result_of(nodes)
            is_over = ended.failure is None or self._stop_request.reason is not None or not self._may_restart
            if is_over or self._sweep():
                return ended
            if next_attempt is None:
                from gputrain_tui.lifecycle.next_attempt import NextAttempt  # imported only after a failure

                next_attempt = NextAttempt(
                    self.dir, self._launcher, self._status_writer, self._stop_request, self._diagnosis
                )
            again = next_attempt.plan(self._plan, ended, nodes.since)
            if isinstance(again, AttemptResult):
                return again
            self._plan = again
            self._gaps.change_plan(again)
            nodes = self._launch(again)
            nodes.write()

    def _launch(self, plan: Plan) -> NodeGroup:
        nodes = self._group(plan, attempt_outcome.record_sizes(self.dir))
        self._record(self._gaps.begin_attempt())
        nodes.launch(self._stop_request)
        return nodes

    def _group(self, plan: Plan, since: Mapping[str, int]) -> NodeGroup:
        return NodeGroup(self.dir, plan, self._launcher, self._poll, since=since, tmp=self._tmp, leased=self.leased)

    def _record(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._status_writer.record(finding)

    def _warn(self, problems: Sequence[str]) -> None:
        self._record(Finding(time=time.time(), kind="not_reported", message=problem) for problem in problems)

    def _adopt(self) -> NodeGroup:
        launched = read_attempt(self.dir)
        self._tmp = Path(launched.tmp)
        self._status_writer.take_over()
        self._begin_report()
        nodes = self._group(self._plan, launched.since)
        nodes.adopt(launched.processes)
        return nodes

    def _watch(self, nodes: NodeGroup) -> None:
        """Wait until all nodes have ended; stop them at a stop request and at the first failure."""
        while nodes.running:
            if self._stop_request.level > nodes.stop_level:
                nodes.stop(self._stop_request.level, step_s=self._diagnosis.step_s)
                self._status_writer.stopping()
            due = min(self._directory.due, self._gaps.due, math.inf if nodes.stop_level else self._diagnosis.due)
            ready = self._wait(min(nodes.deadline, due))
            if time.monotonic() >= self._directory.due:
                if time.monotonic() >= self._directory.due + SILENT_S / 2:
                    self._was_held(nodes)
                self._directory.check()
                self._launcher.request_stacks(nodes.running.values(), self._directory.stack_request)
                self._follow_silence(nodes)
                self._record(self._gaps.check_hosts(nodes.running.values()))
                if nodes.stop_level and nodes.silent:
                    nodes.give_up_silent(self._diagnosis.host_timeout_s)
                self._follow_report()
                self._successor.begin_if_due()
            if ready:
                self._follow_silence(nodes)  # a host that tells the end of its node has answered
            for descriptor in ready:
                nodes.check(descriptor)
            if time.monotonic() >= self._gaps.due:
                self._record(self._gaps.check())
            if not nodes.stop_level and time.monotonic() >= self._diagnosis.due:
                self._diagnose(nodes)
            nodes.kill_if_due()

    def _was_held(self, nodes: NodeGroup) -> None:
        """Count all silence anew: this process was stopped, and heard no host and followed no rank meanwhile."""
        for process in nodes.running.values():
            process.count_silence_anew()
        self._diagnosis.state.silence_ended_at = time.time()

    def _follow_silence(self, nodes: NodeGroup) -> None:
        self._record(silence_findings(nodes.silent, nodes.running.values(), self._plan))

    def _wait(self, due: float) -> list[int]:
        """Sleep until a signal, an event of a node process or ``due``, monotonic seconds; return what is readable."""
        timeout_ms = None if due == math.inf else max(0, math.ceil((due - time.monotonic()) * 1000))
        ready = [descriptor for descriptor, _ in self._poll.poll(timeout_ms)]
        self._stop_request.drain()
        return ready

    def _diagnose(self, nodes: NodeGroup) -> None:
        """Diagnose the run and record its findings; end an attempt that has lost a host, or in which a rank hangs."""
        if nodes.silent:
            self._diagnosis.follow()
            failure = self._diagnosis.lost_host(list(nodes.running.values()), self._plan)
        else:
            self._record(self._diagnosis.check())
            self._status_writer.follow(self._diagnosis.state)
            failure = self._diagnosis.ended_by_network(self._network, self._plan)
            failure = failure or self._diagnosis.ended_by_hang(self._plan)
        if failure is not None:
            nodes.fail(failure)

    def _result_of(self, nodes: NodeGroup) -> AttemptResult:
        self._directory.check()
        if self._directory.deleted is not None:
            return AttemptResult(status="failed", failure=self._directory.deleted)
        result = nodes.result(self._stop_request, self._diagnosis.missing_rank)
        if result.failure is None:
            return result
        cause = self._network.cause(result.failure, self._plan)
        return result if cause is result.failure else replace(result, failure=cause, recorded=False)

    def _sweep(self) -> list[int]:
        """Kill the remaining processes of the run except sinks; return the pids of those that do not end."""
        keep = self._successor.pids() | (set() if self._report is None else self._report.pids())
        left = sorted(kill_descendants(run=str(self.dir.path), keep=keep, wait=self._stop_request.wait))
        reap()
        return left or (leftovers.kill_processes(self.dir.path, keep=keep) if self._adopting else [])

    def _close(self, ended: AttemptResult, left: list[int]) -> ExitCode:
        delete_temporary_folders(self.dir.path, [node.node for node in self._plan.nodes], self._tmp)
        if not left:
            attempt_outcome.delete_partial_checkpoints(self.dir)
        self._record(self._gaps.check(is_last=True))
        self._status_writer.missing_record = attempt_outcome.describe_missing_record(
            self.dir, [node.node for node in self._plan.nodes], self._gaps.standing()
        )
        level = self._stop_request.level
        if ended.status == "finished":
            self._record(self._diagnosis.last_findings())
        state = self._diagnosis.state_at_end()
        if state is not None:  # on a full disk the record lacks these, too
            state.apply_all(self._gaps.findings.values())
        if state is not None and self._status_writer.missing_record:
            state.add_gap(time.time(), self._status_writer.missing_record)
        if state is not None and self._report is not None:
            self._report.tell(state.findings.values())
        if self._launcher.continues(ended, self.dir) and not left and state is not None and state.has_progressed:
            requested_at = self._stop_request.requested_at
            saving_s = None if requested_at is None else time.time() - requested_at
            record = partial(self._status_writer.requeued, ended, state=state)
            if not (problem := self._launcher.requeue(ended, self.dir, saving_s=saving_s, record=record)):
                return ExitCode.STOPPED
            ended = with_note(ended, f"and does not go on: {problem}")
        code = self._status_writer.close(ended, left=left, state=state)
        if self._report is not None:
            self._report.end(self._status_writer, is_interrupted=lambda: self._stop_request.level > level)
        return code

    def _begin_report(self) -> None:
        """Start the report of the recipe; called after the launch of the nodes, which its imports would delay."""
        from gputrain_tui.lifecycle.report_sinks import read_report

        self._report = read_report(self.dir, adopted=self._adopting)
        self._warn([] if self._report is None else self._report.begin())

    def _follow_report(self) -> None:
        if self._report is not None:
            if self._diagnosis.is_current:
                self._report.tell(self._diagnosis.state.findings.values())
            self._warn(self._report.problems())


def main() -> int:
    """Supervise the run of a directory, unless another supervisor does; return the exit code."""
    os.environ.pop(SUPERVISOR, None)  # its children are no supervisors
    arguments = sys.argv[1:]
    run_dir = RunDir(Path(arguments[0]).absolute())
    with os.fdopen(open_to_append(run_dir.lock), "ab") as lock:
        leased, adopting = "--lease" in arguments[1:], "--adopt" in arguments[1:]
        if not run_end.take_lock(lock, patience_s=LOCK_TIMEOUT_S if adopting else 0.0):
            print(f"another supervisor holds the lock of {run_dir.path}", file=sys.stderr)
            return ExitCode.REFUSED
        plan = read_plan(run_dir)
        node_launcher = launcher(plan.launcher)
        if not adopting and (refusal := node_launcher.refusal(run_dir)):
            print(f"gputrain: {refusal}", file=sys.stderr)
            return ExitCode.REFUSED
        if arguments[-1].startswith(CHANNELS):
            from gputrain_tui.hosts.ssh import keep_inherited  # imported only for a run over ssh

            keep_inherited(arguments[-1].removeprefix(CHANNELS))
        may_be_over = adopting or not node_launcher.is_requeued
        if may_be_over and (code := run_end.recorded_exit_code(run_dir, plan)) is not None:
            return code
        may_restart = leased or not adopting or "--restart" in arguments[1:]
        return Supervisor(run_dir, plan, node_launcher, leased=leased, adopting=adopting, may_restart=may_restart).run()


if __name__ == "__main__":
    sys.exit(main())
