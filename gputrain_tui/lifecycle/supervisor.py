"""One run from start to end: launches the plan's nodes, watches them, restarts or stops them, says how it ended.

``python -m gputrain_tui.lifecycle.supervisor RUN_DIR [--lease] [--adopt]``, or ``--warm SECONDS`` to wait for these
words. One thread and never torch: the node agents may ask to die with the thread that started them, and the command
must be there at once. With ``--lease`` the run lives as long as the other end of standard input. With ``--adopt`` it
takes over from a supervisor that was killed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gputrain_tui.history.runs import read_plan
from gputrain_tui.lifecycle import attempt_outcome, leftovers, settle
from gputrain_tui.lifecycle.attempt import (
    Attempt,
    AttemptResult,
    is_temporary_of,
    read_launched,
    temporary_prefix,
    write_launched,
)
from gputrain_tui.lifecycle.launchers import Launcher, NodeProcess, launcher
from gputrain_tui.lifecycle.orphans import adopt_orphans, sweep
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.lifecycle.stop_requests import StopLevel, StopRequests
from gputrain_tui.plan.planner import Plan, stop_grace
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.outcome import LOST_PEER_KINDS, SAVE_TIMEOUT_S, exit_code_of
from trainer.contract.record import Failure, Finding, RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.host.proc_environ import show_in_proc

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
    from gputrain_tui.lifecycle.warm_supervisor import WarmAgent

STOP_GRACE_S = 5.0
"""How long the nodes may take to leave when they are stopped at once; when asked in order, besides what the ranks may
take to answer and to save."""
FAILURE_GRACE_S = 1.5
"""How long the other nodes may take once one has failed; all are gone within two seconds."""
SWEEP_S = 5.0
"""How long killed processes may take to disappear."""
TEMPORARY_LENGTH = 60
"""Longest name of a temporary folder in which a Unix socket can still be named (108 bytes with everything)."""
ADOPTION_S = 1.0
"""How long a successor waits for the lock, which outlives a killed supervisor in a process that it was starting."""
DIRECTORY_S = 1.0
"""How often the run directory is looked for."""
FIRST_LOOK_S = 1.0
"""When a run is first looked at for what is wrong with it; its ranks have better use for the processor till then."""


class Supervisor:
    """The one process that answers for a run."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        leased: bool,
        adopting: bool = False,
        warm_agent: WarmAgent | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.dir = run_dir
        self._warm_agent = warm_agent
        self.leased = leased
        self._adopting = adopting
        self._now = now
        self._stop_requests = StopRequests(leased=leased)
        self._plan = read_plan(run_dir)
        self._status_writer = RunStatusWriter(run_dir, self._plan, now=now)
        self._tmp: Path | None = None
        self._diagnosis: LiveDiagnosis | None = None
        self._look_at = time.monotonic() + FIRST_LOOK_S
        self._check_at = 0.0
        """When the run directory is looked for again, monotonic seconds."""
        self._deleted: Failure | None = None
        """That the run directory is gone, once it is."""

    def run(self) -> ExitCode:
        """Take the run from start to end; return its exit code."""
        self._stop_requests.catch()
        show_in_proc(leftovers.SUPERVISOR, str(self.dir.path))  # from here on it may be asked to end the run
        adopt_orphans()
        try:
            ended = self._adopted() if self._adopting else self._attempts()
        except BaseException as error:  # whatever it is, nothing is left behind and the record says it; then it goes on
            left = self._sweep()
            what = f"the supervisor failed: {type(error).__name__}: {error}"
            self._close(AttemptResult(status="failed", failure=self._failure("launch", what)), left)
            raise
        return self._close(ended, self._sweep())

    # ------------------------------------------------------------------------------------------------ attempts

    def _attempts(self) -> AttemptResult:
        plan = self._plan
        try:
            way = launcher(plan.launcher)
        except RequestError as error:
            return AttemptResult(status="failed", failure=self._failure("request", str(error)))
        if self._warm_agent is not None and plan.launcher == "local":
            from gputrain_tui.lifecycle.warm_supervisor import WarmFirstLauncher

            way = WarmFirstLauncher(self._warm_agent, way, plan.nodes)
        env = self._environment()
        restarts: int | None = None
        while True:
            attempt = self._launch(plan, way, env)
            if restarts is None:  # the nodes are on their way: nothing before them delays the first step
                self._status_writer.started()
            write_launched(self.dir, attempt, str(self._tmp))
            self._watch(attempt)
            ended = self._judge(attempt)
            if ended.failure is None or exit_code_of(ended.failure) != ExitCode.FAILED:
                return ended
            from gputrain_tui.lifecycle import restart  # a healthy run does not wait for it

            restarts = restart.max_restarts(self.dir) if restarts is None else restarts
            if not restarts or self._stop_requests.reason is not None or self._sweep():
                return ended
            restarts -= 1
            if not ended.recorded:
                self._status_writer.record(ended.failure)
            self._status_writer.restarting()
            plan = restart.again(plan, self.dir)

    def _launch(self, plan: Plan, way: Launcher, env: Mapping[str, str]) -> Attempt:
        attempt = Attempt(since=attempt_outcome.sizes(self.dir))
        for node in plan.nodes:
            if self._stop_requests.reason is not None:
                break
            self.dir.node_result(node.node).unlink(missing_ok=True)
            try:
                process = way.launch(node, self.dir, env=env, leased=self.leased)
            except OSError as error:
                what = f"node {node.node}: cannot start {node.argv[0]}: {error.strerror or error}"
                attempt.failure = self._failure("launch", what, host=node.host)
                self._stop(attempt, 2, FAILURE_GRACE_S)
                break
            attempt.running[process.fileno()] = process
            self._stop_requests.watch(process.fileno())
        return attempt

    def _adopted(self) -> AttemptResult:
        """Watch the nodes that a killed supervisor launched; those of a leased run have gone with it."""
        launched = read_launched(self.dir)
        tmp = Path(launched.tmp)
        self._tmp = tmp if is_temporary_of(self.dir, tmp) else self.dir.tmp
        self._status_writer.answer()
        way = launcher(self._plan.launcher)
        attempt = Attempt(since=launched.since)
        for node in self._plan.nodes:
            identity = launched.processes.get(node.node)
            process = way.adopt(node, self.dir, identity) if identity is not None else None
            if process is not None:
                attempt.running[process.fileno()] = process
                self._stop_requests.watch(process.fileno())
                continue
            missing = attempt_outcome.unfinished(self.dir, node.node, node.ranks, attempt.since)
            attempt.ended[node.node] = attempt_outcome.NodeEnd(
                host=node.host, exit_code=ExitCode.FAILED, unfinished=missing
            )
        if any(end.unfinished for end in attempt.ended.values()):
            self._stop(attempt, 2, FAILURE_GRACE_S)
        self._watch(attempt)
        return self._judge(attempt)

    def _watch(self, attempt: Attempt) -> None:
        """Wait until no node is left, passing on the stop request and the first failure."""
        while attempt.running:
            if self._stop_requests.level > attempt.stopping:
                self._stop(attempt, self._stop_requests.level, self._grace_s())
            due = self._check_at if attempt.deadline is None else min(attempt.deadline, self._check_at)
            for descriptor in self._stop_requests.wait(due if attempt.stopping else min(due, self._look_at)):
                process = attempt.running.get(descriptor)
                code = process.poll() if process is not None else None
                if process is not None and code is not None:
                    self._node_ended(attempt, descriptor, process, code)
            if time.monotonic() >= self._check_at:
                self._look_for_directory()
            if not attempt.stopping and time.monotonic() >= self._look_at:
                self._diagnose()
            if attempt.deadline is not None and time.monotonic() >= attempt.deadline:
                attempt.deadline = None
                for process in attempt.running.values():
                    process.kill()

    def _look_for_directory(self) -> None:
        """End a run whose directory was deleted: its record is lost, and nobody would find it any more."""
        self._check_at = time.monotonic() + DIRECTORY_S
        if self._deleted is None and attempt_outcome.is_deleted(self.dir):
            self._deleted = attempt_outcome.deleted(self.dir, self._now())
            print(self._deleted.message, file=sys.stderr, flush=True)
            self._stop_requests.ask(self._deleted.message, 1)  # in order: the ranks may save somewhere else

    def _diagnose(self) -> None:
        """Look at the record, and write down what is found."""
        try:
            if self._diagnosis is None:
                from gputrain_tui.lifecycle.diagnosis_watch import (
                    LiveDiagnosis,  # the nodes are under way before it is imported
                )

                self._diagnosis = LiveDiagnosis(self.dir, now=self._now)
            for finding in self._diagnosis.look():
                self._status_writer.record(finding)
            self._look_at = time.monotonic() + self._diagnosis.due_in_s()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with looking must not end what is looked at
            traceback.print_exc()
            self._look_at = math.inf
            what = f"this run is no longer diagnosed: {type(error).__name__}: {error}"
            self._status_writer.record(Finding(time=self._now(), kind="not_diagnosed", severity="info", message=what))

    def _node_ended(self, attempt: Attempt, descriptor: int, process: NodeProcess, code: int) -> None:
        del attempt.running[descriptor]
        self._stop_requests.forget(descriptor)
        process.close()
        ranks = next(node.ranks for node in self._plan.nodes if node.node == process.node)
        missing = attempt_outcome.unfinished(self.dir, process.node, ranks, attempt.since)
        if missing and code == ExitCode.FINISHED and attempt_outcome.is_full(self.dir):
            missing = []  # their parent has heard what they could not write down, and could not write it down either
        code = attempt_outcome.exit_code(self.dir, process.node, code) if missing else code
        attempt.ended[process.node] = attempt_outcome.NodeEnd(host=process.host, exit_code=code, unfinished=missing)
        if missing and not attempt.stopping:
            self._stop(attempt, 2, FAILURE_GRACE_S)

    def _grace_s(self) -> float:
        """How long the nodes may take to leave, as somebody wants the run to end; they look after their ranks."""
        if self._stop_requests.level == 3:
            return 0.0
        if self._stop_requests.level == 2:
            return STOP_GRACE_S
        return max(stop_grace(node.argv) for node in self._plan.nodes) + SAVE_TIMEOUT_S + STOP_GRACE_S

    def _stop(self, attempt: Attempt, level: StopLevel, grace_s: float) -> None:
        attempt.stopping = level
        deadline = time.monotonic() + grace_s
        attempt.deadline = deadline if attempt.deadline is None else min(deadline, attempt.deadline)
        for process in attempt.running.values():
            process.stop(at_once=level > 1)
        if self._stop_requests.reason is not None:
            self._status_writer.stopping()

    def _judge(self, attempt: Attempt) -> AttemptResult:
        self._look_for_directory()
        if self._deleted is not None:
            return AttemptResult(status="failed", failure=self._deleted)
        ends = attempt.ended.values()
        if len(ends) == len(self._plan.nodes) and not any(end.unfinished for end in ends):
            return AttemptResult(status="finished")
        if self._stop_requests.reason is not None:
            return AttemptResult(status="stopped", reason=self._stop_requests.reason)
        if attempt.failure is not None:
            return AttemptResult(status="failed", failure=attempt.failure)
        if not self._adopting and (stopped := attempt_outcome.stopped_first(attempt.ended)) is not None:
            where = attempt.ended[stopped].host
            return AttemptResult(status="stopped", reason=f"node {stopped} was stopped on {where}")
        failure = attempt_outcome.cause(self.dir, attempt.since, attempt.ended, self._now())
        told = attempt_outcome.failures(self.dir, attempt.since)
        recorded = failure in told
        only_lost = bool(told) and all(each.kind == "lost_peer" for each in told)
        # A node agent knows less of the run than its record.
        if only_lost and failure.kind in LOST_PEER_KINDS and (missing := self._missing()) is not None:
            failure, recorded = missing, False
        if self._adopting and not recorded:
            failure = self._failure("signal", "the run's supervisor was killed, and its ranks ended with it")
        return AttemptResult(status="failed", failure=failure, recorded=recorded)

    def _missing(self) -> Failure | None:
        """Return the failure of the rank that others have lost, where the record tells which one that is."""
        from gputrain_tui.diagnosis.missing import missing
        from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis

        try:
            watch = self._diagnosis or LiveDiagnosis(self.dir, now=self._now)
            return missing(watch.state_at_end())
        except Exception:  # noqa: BLE001 - whatever is wrong with looking, the run ends with what the ranks say
            traceback.print_exc()
            return None

    # --------------------------------------------------------------------------------------------------- the end

    def _sweep(self) -> list[int]:
        """Leave nothing of the run behind; return the pids of what would not go."""
        left = sweep(SWEEP_S, self._stop_requests.nap)
        return left or (leftovers.end(self.dir.path) if self._adopting else [])

    def _close(self, ended: AttemptResult, left: list[int]) -> ExitCode:
        if self._tmp is not None:
            shutil.rmtree(self._tmp, ignore_errors=True)
        if not left:
            attempt_outcome.clear_unfinished(self.dir)
        self._status_writer.remark = attempt_outcome.not_recorded(self.dir, [node.node for node in self._plan.nodes])
        return self._status_writer.close(ended, left=left)

    def _failure(self, kind: str, message: str, *, host: str | None = None) -> Failure:
        return Failure(time=self._now(), kind=kind, message=message, host=host)

    def _environment(self) -> dict[str, str]:
        """What all nodes of the run share: its mark, by which its processes are found, and a temporary folder."""
        self._tmp = self.dir.tmp
        if len(str(self._tmp)) > TEMPORARY_LENGTH:
            self._tmp = Path(tempfile.mkdtemp(prefix=temporary_prefix(self.dir)))
        self._tmp.mkdir(mode=0o700, exist_ok=True)
        return {leftovers.MARK: str(self.dir.path), "TMPDIR": str(self._tmp)}


def main() -> int:
    """Supervise the run of a directory, unless another process does."""
    os.environ.pop(leftovers.SUPERVISOR, None)  # what it starts is no supervisor
    words = sys.argv[1:]
    if words[0] != "--warm":
        return _supervise(words)
    from gputrain_tui.lifecycle import warm_supervisor

    asked = warm_supervisor.wait_for_run(float(words[1]))
    if asked is None:
        return ExitCode.FINISHED
    words, warm_agent = asked
    try:
        return _supervise(words, warm_agent)
    finally:
        warm_agent.discard()


def _supervise(words: Sequence[str], warm_agent: WarmAgent | None = None) -> int:
    run_dir = RunDir(Path(words[0]).absolute())
    with os.fdopen(open_to_append(run_dir.lock), "ab") as lock:
        leased, adopting = "--lease" in words[1:], "--adopt" in words[1:]
        if not settle.locked(lock, patience_s=ADOPTION_S if adopting else 0.0):
            print(f"another supervisor answers for {run_dir.path}", file=sys.stderr)
            return ExitCode.REFUSED
        if adopting and (code := settle.ended_already(run_dir, read_plan(run_dir))) is not None:
            return code
        return Supervisor(run_dir, leased=leased, adopting=adopting, warm_agent=warm_agent).run()


if __name__ == "__main__":
    sys.exit(main())
