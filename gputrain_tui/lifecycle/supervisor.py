"""Supervisor of one run: launches the nodes of its plan, watches, restarts or stops them, and records the end.

``python -m gputrain_tui.lifecycle.supervisor RUN_DIR [--lease] [--adopt]``. It never imports torch, so that it starts
fast. Only its main thread starts node agents, as they may end with the thread that started them
(``PR_SET_PDEATHSIG``). With ``--lease`` the run ends when standard input is closed. With ``--adopt`` it takes over from
a supervisor that was killed.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.hosts import slurm
from gputrain_tui.hosts.open_connections import CONNECTIONS, OpenConnection
from gputrain_tui.lifecycle import attempt_outcome, leftovers, settle
from gputrain_tui.lifecycle.attempt import (
    Attempt,
    AttemptResult,
    delete_temporary_files,
    read_attempt,
    write_attempt,
)
from gputrain_tui.lifecycle.launchers import Launcher, NodeProcess, launcher
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.lifecycle.stop_file import read_stop_file
from gputrain_tui.plan.planner import Plan, stop_grace
from trainer.contract.errors import ExitCode, RequestError, printable
from trainer.contract.outcome import LOST_PEER_KINDS, SAVE_TIMEOUT_S, answer_s, exit_code_of, node_outcome
from trainer.contract.record import Failure, Finding, RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.stop_level import StopLevel
from trainer.host import process_guard
from trainer.host.descendants import kill_descendants, reap
from trainer.host.stop_request import NOW_SIGNAL, StopRequest
from trainer.host.temporary_folder import system_folder

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
    from gputrain_tui.lifecycle.report import RunReport
    from gputrain_tui.state import RunState

STOP_GRACE_S = 5.0
"""Time for the nodes to exit after a stop without saving; for one with saving, in addition to the time limits of the
ranks to answer and to save."""
FAILURE_GRACE_S = 1.5
"""Time for the other nodes to exit after one has failed, so that all have ended within two seconds."""
SWEEP_S = 5.0
"""Time for killed processes to end."""
LOCK_TIMEOUT_S = 1.0
"""Time for an adopting supervisor to get the lock, which a process that was being forked may hold for a moment."""
DIRECTORY_CHECK_S = 1.0
"""Time between two checks of the run directory."""
SILENT_S = 5.0
"""Silence of a host, which answers once a second, from which it is reported; the run is not diagnosed meanwhile, as
the record of its ranks ends where the connection broke."""
FIRST_DIAGNOSIS_S = 1.0
"""Time of the first diagnosis after the start; until then it would slow down the start of the ranks."""


class Supervisor:
    """Supervisor of one plan: its attempts, its stop and the record of both."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        leased: bool,
        adopting: bool = False,
        connections: Mapping[int, OpenConnection] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.dir = run_dir
        self._connections = connections
        self.leased = leased
        self._adopting = adopting
        self._now = now
        self._stop_request = StopRequest(lease=leased)
        self._poll = select.poll()
        self._plan = read_plan(run_dir)
        self._status_writer = RunStatusWriter(run_dir, self._plan, now=now)
        self._tmp = system_folder()
        """Folder in which the nodes of this machine have their temporary folders."""
        self._diagnosis: LiveDiagnosis | None = None
        self._diagnose_at = time.monotonic() + FIRST_DIAGNOSIS_S
        self._directory_check_at = 0.0
        """Time of the next check of the run directory, monotonic seconds."""
        self._over_before: set[int] = set()
        """Nodes that had ended, with unfinished ranks, when the run was adopted."""
        self._silent: set[int] = set()
        """Nodes whose hosts do not answer."""
        self._log_sizes: Mapping[str, int] = {}
        """Sizes of the logs that Slurm prints into, at the start of the last attempt."""
        self._report: RunReport | None = None
        """Report by ``[report]`` of the recipe; None without one."""
        self._deleted: Failure | None = None
        """Failure of a run whose directory was deleted."""

    def run(self) -> ExitCode:
        """Supervise the run to its end; return its exit code."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes the poll
        self._stop_request.catch()
        self._poll.register(self._stop_request, select.POLLIN)
        process_guard.adopt_orphans()
        try:
            ended = self._adopt() if self._adopting else self._run_attempts()
        except BaseException as error:  # clean up and record the error before raising it
            left = self._sweep()
            message = f"the supervisor failed: {type(error).__name__}: {error}"
            self._close(AttemptResult(status="failed", failure=self._failure("launch", message)), left)
            raise
        left = self._sweep()
        if self._plan.launcher == "slurm":
            from gputrain_tui.lifecycle import slurm_jobs

            ended = slurm_jobs.with_slurm_cause(ended, self._plan, self.dir, since=self._log_sizes)
        return self._close(ended, left)

    # ------------------------------------------------------------------------------------------------ attempts

    def _run_attempts(self) -> AttemptResult:
        plan = self._plan
        try:
            node_launcher = launcher(plan.launcher)
            if plan.launcher == "slurm":
                from gputrain_tui.lifecycle import slurm_jobs

                plan = self._plan = slurm_jobs.place(self.dir, plan)
        except RequestError as error:
            return AttemptResult(status="failed", failure=self._failure("request", str(error)))
        if self._connections:
            from gputrain_tui.lifecycle.launchers.ssh import SshLauncher

            node_launcher = SshLauncher(self._connections)
        env = self._environment()
        restarts: int | None = None
        failed_before: Failure | None = None
        while True:
            attempt = self._launch(plan, node_launcher, env)
            if restarts is None:  # after the launch, so that it does not delay the first step
                self._status_writer.started()
            write_attempt(self.dir, attempt)
            if restarts is None:
                self._begin_report()
            self._watch(attempt)
            ended = self._result_of(attempt)
            if ended.failure is None or exit_code_of(ended.failure) != ExitCode.FAILED:
                return ended
            from gputrain_tui.lifecycle import restart  # imported only after a failure

            restarts = restart.max_restarts(self.dir) if restarts is None else restarts
            if not restarts or self._stop_request.reason is not None or self._sweep():
                return ended
            if restart.is_repeated(ended.failure, failed_before):
                return replace(ended, failure=restart.with_repetition(ended.failure))
            failed_before = ended.failure
            restarts -= 1
            if not ended.recorded:
                self._status_writer.record(ended.failure)
            self._status_writer.restarting()
            plan = restart.next_plan(plan, self.dir)

    def _launch(self, plan: Plan, node_launcher: Launcher, env: Mapping[str, str]) -> Attempt:
        attempt = Attempt(since=attempt_outcome.event_file_sizes(self.dir), tmp=self._tmp)
        if plan.launcher == "slurm":
            from gputrain_tui.lifecycle import slurm_jobs

            self._log_sizes = slurm_jobs.log_sizes(self.dir)
        for node in plan.nodes:
            if self._stop_request.reason is not None:
                break
            self.dir.node_result(node.node).unlink(missing_ok=True)
            try:
                process = node_launcher.launch(node, self.dir, env=env, leased=self.leased)
            except OSError as error:
                message = f"node {node.node}: cannot start {node.argv[0]}: {error.strerror or error}"
                attempt.failure = self._failure("launch", message, host=node.host)
                self._stop(attempt, StopLevel.NOW, FAILURE_GRACE_S)
                break
            attempt.running[process.fileno()] = process
            self._poll.register(process, select.POLLIN)
        return attempt

    def _warn(self, problems: Sequence[str]) -> None:
        for problem in problems:
            self._status_writer.record(Finding(time=self._now(), kind="not_reported", message=problem))

    def _adopt(self) -> AttemptResult:
        """Take over the nodes of a killed supervisor and watch them; nodes of a leased run have ended with it."""
        launched = read_attempt(self.dir)
        self._tmp = Path(launched.tmp)
        self._status_writer.take_over()
        self._begin_report()
        node_launcher = launcher(self._plan.launcher)
        attempt = Attempt(since=launched.since, tmp=self._tmp)
        for node in self._plan.nodes:
            identity = launched.processes.get(node.node)
            process = node_launcher.adopt(node, self.dir, identity, leased=self.leased)
            if process is not None:
                attempt.running[process.fileno()] = process
                self._poll.register(process, select.POLLIN)
                continue
            missing = attempt_outcome.unfinished(self.dir, node.node, node.ranks, attempt.since)
            self._over_before |= {node.node} if missing else set()
            attempt.ended[node.node] = attempt_outcome.NodeEnd(
                host=node.host, exit_code=ExitCode.FAILED, unfinished=missing
            )
        if any(end.unfinished for end in attempt.ended.values()):
            self._stop(attempt, StopLevel.NOW, FAILURE_GRACE_S)
        self._watch(attempt)
        return self._result_of(attempt)

    def _watch(self, attempt: Attempt) -> None:
        """Wait until all nodes have ended; stop them at a stop request and at the first failure."""
        while attempt.running:
            if self._stop_request.level > attempt.stop_level:
                self._stop(attempt, self._stop_request.level, self._grace_s())
            due = (
                self._directory_check_at
                if attempt.deadline is None
                else min(attempt.deadline, self._directory_check_at)
            )
            for descriptor in self._wait(due if attempt.stop_level else min(due, self._diagnose_at)):
                process = attempt.running.get(descriptor)
                code = process.poll() if process is not None else None
                if process is not None and code is not None:
                    self._node_ended(attempt, descriptor, process, code)
                elif process is not None:  # its identity is known, as its host has answered
                    write_attempt(self.dir, attempt)
            if time.monotonic() >= self._directory_check_at:
                self._check_directory()
                self._check_hosts(attempt)
                self._warn([] if self._report is None else self._report.problems())
            if not attempt.stop_level and time.monotonic() >= self._diagnose_at:
                self._diagnose()
            if attempt.deadline is not None and time.monotonic() >= attempt.deadline:
                attempt.deadline = None
                for process in attempt.running.values():
                    process.kill()

    def _wait(self, due: float) -> list[int]:
        """Sleep until a signal, an event of a node process or a time; return the readable file descriptors.

        Args:
            due: time to wake at the latest, monotonic seconds; may be infinite.
        """
        timeout_ms = None if due == math.inf else max(0, math.ceil((due - time.monotonic()) * 1000))
        ready = [descriptor for descriptor, _ in self._poll.poll(timeout_ms)]
        self._stop_request.drain()
        return ready

    def _check_directory(self) -> None:
        """Touch the lock, and stop the run at a request in the stop file or if its directory was deleted.

        No command finds a run without a directory.
        """
        self._directory_check_at = time.monotonic() + DIRECTORY_CHECK_S
        with suppress(OSError):
            os.utime(self.dir.lock)
        if (level := read_stop_file(self.dir)) > self._stop_request.level:
            self._stop_request.ask(level, "stopped by `gputrain stop` on another host")
        if self._deleted is None and attempt_outcome.is_deleted(self.dir):
            self._deleted = attempt_outcome.deletion_failure(self.dir, self._now())
            print(self._deleted.message, file=sys.stderr, flush=True)
            self._stop_request.ask(StopLevel.SAVE, self._deleted.message)  # ``save_dir`` may be somewhere else

    def _check_hosts(self, attempt: Attempt) -> None:
        """Record a finding for each host that has become silent or answers again."""
        for process in attempt.running.values():
            silent_s = process.silent_s()
            if (silent_s >= SILENT_S) == (process.node in self._silent):
                continue
            self._silent ^= {process.node}
            self._status_writer.record(
                Finding(
                    time=self._now(),
                    kind="host_silent",
                    state="raised" if process.node in self._silent else "cleared",
                    rank=self._plan.nodes[process.node].first_rank,
                    host=process.host,
                    message=f"no contact with {process.host}: its ranks may still be running; "
                    "their record follows when it answers again",
                    advice=f"check that `ssh {process.host} true` works",
                )
            )

    def _diagnose(self) -> None:
        """Diagnose the run and record its findings."""
        if self._silent:
            self._diagnose_at = time.monotonic() + DIRECTORY_CHECK_S
            return
        try:
            if self._diagnosis is None:
                # Imported after the launch of the nodes, which it would delay.
                from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis

                self._diagnosis = LiveDiagnosis(self.dir, now=self._now)
            for finding in self._diagnosis.check():
                self._status_writer.record(finding)
            self._status_writer.validated(self._diagnosis.state)
            self._diagnose_at = time.monotonic() + self._diagnosis.due_in_s()
        except Exception as error:  # noqa: BLE001 - a defect of the diagnosis must not end the run
            traceback.print_exc()
            self._diagnose_at = math.inf
            message = f"this run is no longer diagnosed: {type(error).__name__}: {error}"
            finding = Finding(time=self._now(), kind="not_diagnosed", severity="info", message=message)
            self._status_writer.record(finding)

    def _node_ended(self, attempt: Attempt, descriptor: int, process: NodeProcess, code: int) -> None:
        del attempt.running[descriptor]
        self._silent.discard(process.node)
        self._poll.unregister(descriptor)
        process.close()
        ranks = next(node.ranks for node in self._plan.nodes if node.node == process.node)
        missing = attempt_outcome.unfinished(self.dir, process.node, ranks, attempt.since)
        if missing and code == ExitCode.FINISHED and attempt_outcome.disk_is_full(self.dir):
            missing = []  # neither the ranks nor their node agent could write their end
        code = attempt_outcome.exit_code(self.dir, process.node, code) if missing else code
        by_us = attempt.stop_level and (attempt.deadline is None or code == -NOW_SIGNAL)
        attempt.ended[process.node] = attempt_outcome.NodeEnd(
            host=process.host,
            exit_code=code,
            unfinished=missing,
            host_error=printable(process.host_error),
            killed_by_us=bool(by_us),
        )
        if missing and not attempt.stop_level:
            self._stop(attempt, StopLevel.NOW, FAILURE_GRACE_S)

    def _grace_s(self) -> float:
        """Return the time for the nodes to exit at the stop level; node agents limit the time of their ranks."""
        if self._stop_request.level == StopLevel.KILL:
            return 0.0
        if self._stop_request.level == StopLevel.NOW:
            return STOP_GRACE_S
        step_s = self._diagnosis.step_s if self._diagnosis is not None else 0.0
        return max(answer_s(stop_grace(node.argv), step_s) for node in self._plan.nodes) + SAVE_TIMEOUT_S + STOP_GRACE_S

    def _stop(self, attempt: Attempt, level: StopLevel, grace_s: float) -> None:
        attempt.stop_level = level
        deadline = time.monotonic() + grace_s
        attempt.deadline = deadline if attempt.deadline is None else min(deadline, attempt.deadline)
        for process in attempt.running.values():
            process.stop(level)
        if self._stop_request.reason is not None:
            self._status_writer.stopping()

    def _result_of(self, attempt: Attempt) -> AttemptResult:
        self._check_directory()
        if self._deleted is not None:
            return AttemptResult(status="failed", failure=self._deleted)
        ends = attempt.ended.values()
        if len(ends) == len(self._plan.nodes) and not any(end.unfinished for end in ends):
            return AttemptResult(status="finished")
        stop_reason = None if self._failed_before_stop(attempt) else self._stop_request.reason
        if stop_reason is not None:
            return AttemptResult(status="stopped", reason=stop_reason)
        if attempt.failure is not None:
            return AttemptResult(status="failed", failure=attempt.failure)
        unasked = not self._adopting and self._stop_request.reason is None
        if unasked and (stopped := attempt_outcome.first_stopped_node(attempt.ended)) is not None:
            host = attempt.ended[stopped].host
            return AttemptResult(status="stopped", reason=f"node {stopped} was stopped on {host}")
        failure = attempt_outcome.cause(self.dir, attempt.since, attempt.ended, self._now())
        failures = attempt_outcome.failures(self.dir, attempt.since)
        recorded = failure in failures
        only_lost = bool(failures) and all(other.kind == "lost_peer" for other in failures)
        # The record of all ranks shows the lost one better than the failure of a node agent.
        if only_lost and failure.kind in LOST_PEER_KINDS and (missing := self._missing_rank()) is not None:
            failure, recorded = missing, False
        if self._adopting and attempt_outcome.recorded_cause(self.dir, attempt.since, attempt.ended) is None:
            failure = self._failure("signal", "the run's supervisor was killed, and its ranks ended with it")
        return AttemptResult(status="failed", failure=failure, recorded=recorded)

    def _failed_before_stop(self, attempt: Attempt) -> bool:
        """Whether the attempt had failed before the stop request, so that its result is the cause of that failure."""
        if self._stop_request.asked_at is None:
            return False
        outcomes = {node: node_outcome(self.dir, node) for node in self._over_before}
        if any(outcome is None or outcome.failure is not None for outcome in outcomes.values()):
            return True
        nodes = [node.node for node in self._plan.nodes]
        return attempt_outcome.failed_before(self.dir, attempt.since, nodes, self._stop_request.asked_at)

    def _missing_rank(self) -> Failure | None:
        """Return the failure of the rank that the others have lost; None if the record does not show which one."""
        from gputrain_tui.diagnosis.missing import lost_peer

        state = self._state_at_end()
        try:
            return None if state is None else lost_peer(state)
        except Exception:  # noqa: BLE001 - after a defect of the diagnosis the recorded failures count
            traceback.print_exc()
            return None

    def _record_last_findings(self) -> None:
        """Record what the last steps show: a short run is over before its first diagnosis."""
        if self._state_at_end() is None or self._diagnosis is None or self._silent:
            return
        try:
            for finding in self._diagnosis.last_findings():
                self._status_writer.record(finding)
        except Exception:  # noqa: BLE001 - a defect of the diagnosis must not keep the run from ending
            traceback.print_exc()

    def _state_at_end(self) -> RunState | None:
        """Return the run's state after its whole record; None if it cannot be read."""
        from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis

        try:
            watch = self._diagnosis = self._diagnosis or LiveDiagnosis(self.dir, now=self._now)
            return watch.state_at_end()
        except Exception:  # noqa: BLE001 - a defect of the diagnosis must not keep the run from ending
            traceback.print_exc()
            return None

    # --------------------------------------------------------------------------------------------------- the end

    def _sweep(self) -> list[int]:
        """Kill the remaining processes of the run except sinks; return the pids of those that do not end."""
        keep = set() if self._report is None else self._report.pids()
        left = sorted(
            kill_descendants(run=str(self.dir.path), keep=keep, timeout_s=SWEEP_S, wait=self._stop_request.wait)
        )
        reap()
        return left or (leftovers.kill_processes(self.dir.path, keep=keep) if self._adopting else [])

    def _close(self, ended: AttemptResult, left: list[int]) -> ExitCode:
        delete_temporary_files(self.dir, [node.node for node in self._plan.nodes], self._tmp)
        if not left:
            attempt_outcome.delete_partial_checkpoints(self.dir)
        self._status_writer.remark = attempt_outcome.describe_missing_record(
            self.dir, [node.node for node in self._plan.nodes]
        )
        if ended.status == "finished":
            self._record_last_findings()
        level = self._stop_request.level
        state = self._state_at_end()
        if state is not None and self._status_writer.remark:
            state.add_gap(self._now(), self._status_writer.remark)
        code = self._status_writer.close(ended, left=left, state=state)
        if self._report is not None:
            self._report.end(self._status_writer, hurried=lambda: self._stop_request.level > level)
        return code

    def _begin_report(self) -> None:
        """Start the report of the recipe; called after the launch of the nodes, which its imports would delay."""
        from gputrain_tui.lifecycle.report import read_report

        self._report = read_report(self.dir, adopted=self._adopting)
        self._warn([] if self._report is None else self._report.begin())
        if not self._adopting and slurm.is_requeued():
            self.dir.on_end_log.unlink(missing_ok=True)  # of the end before the requeue, so that ``on_end`` runs again

    def _failure(self, kind: str, message: str, *, host: str | None = None) -> Failure:
        return Failure(time=self._now(), kind=kind, message=message, host=host)

    def _environment(self) -> dict[str, str]:
        """Return the environment of all nodes: the run directory."""
        return {leftovers.MARK: str(self.dir.path)}


def main() -> int:
    """Supervise the run of a directory, unless another supervisor does; return the exit code."""
    os.environ.pop(leftovers.SUPERVISOR, None)  # its children are no supervisors
    words = sys.argv[1:]
    run_dir = RunDir(Path(words[0]).absolute())
    with os.fdopen(open_to_append(run_dir.lock), "ab") as lock:
        leased, adopting = "--lease" in words[1:], "--adopt" in words[1:]
        inherited = next((word.removeprefix(CONNECTIONS) for word in words if word.startswith(CONNECTIONS)), "{}")
        if not settle.take_lock(lock, patience_s=LOCK_TIMEOUT_S if adopting else 0.0):
            print(f"another supervisor holds the lock of {run_dir.path}", file=sys.stderr)
            return ExitCode.REFUSED
        if (adopting or not slurm.is_requeued()) and (
            code := settle.recorded_exit_code(run_dir, read_plan(run_dir))
        ) is not None:
            return code
        connections = msgspec.json.decode(inherited, type=dict[int, OpenConnection])
        return Supervisor(run_dir, leased=leased, adopting=adopting, connections=connections).run()


if __name__ == "__main__":
    sys.exit(main())
