"""Node processes of one attempt at a run: launched or adopted, stopped, and read for the attempt's result."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.attempt import AttemptRecord, AttemptResult, write_attempt
from gputrain_tui.lifecycle.launchers import Launcher
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.plan.planner import Plan, stop_grace
from gputrain_tui.tables import ranks_text
from trainer.contract.errors import ExitCode, printable
from trainer.contract.outcome import LOST_PEER_KINDS, SAVE_TIMEOUT_S, answer_s, node_outcome
from trainer.contract.record import Failure, RunDir
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import ProcessIdentity
from trainer.host.processes import RUN
from trainer.host.stop_request import NOW_SIGNAL, StopRequest

STOP_GRACE_S = 5.0
"""Time for the nodes to exit after a stop without saving; for one with saving, in addition to the time limits of the
ranks to answer and to save."""
FAILURE_GRACE_S = 1.5
"""Time for the other nodes to exit after one has failed, so that all have ended within two seconds."""


class NodeGroup:
    """Node processes of one attempt, which its supervisor polls.

    Args:
        run_dir: of the run.
        plan: of the attempt.
        launcher: that starts or adopts the nodes.
        poll: gets the file descriptor of each process that runs.
        since: sizes of the event files and the nodes' logs at the start of the attempt, by file name.
        tmp: folder in which the nodes of this machine have their temporary folders.
        leased: whether the nodes end with the supervisor.
    """

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan,
        launcher: Launcher,
        poll: select.poll,
        *,
        since: Mapping[str, int],
        tmp: Path,
        leased: bool,
    ) -> None:
        self.since = since
        self.running: dict[int, NodeProcess] = {}
        """By the file descriptor of the process."""
        self.silent: set[int] = set()
        """Running nodes whose hosts do not answer."""
        self.stop_level = StopLevel.NONE
        self.deadline = math.inf
        """Time at which running nodes are killed, monotonic seconds."""
        self._dir = run_dir
        self._plan = plan
        self._launcher = launcher
        self._poll = poll
        self._tmp = tmp
        self._leased = leased
        self._ended: dict[int, attempt_outcome.NodeEnd] = {}
        """By node, in the order in which they ended."""
        self._failure: Failure | None = None
        """Failure that the supervisor itself has found."""
        self._is_adopted = False
        self._over_before: set[int] = set()
        """Nodes that had ended, with unfinished ranks, when they were adopted."""

    def launch(self, stop_request: StopRequest) -> None:
        """Start the nodes, unless one cannot be started or a stop is requested meanwhile."""
        self._launcher.begin_attempt(self._dir)
        env = {RUN: str(self._dir.path)}
        for node in self._plan.nodes:
            if stop_request.reason is not None:
                break
            self._dir.node_result(node.node).unlink(missing_ok=True)
            try:
                process = self._launcher.launch(node, self._dir, env=env, leased=self._leased)
            except OSError as error:
                message = f"node {node.node}: cannot start {node.argv[0]}: {error.strerror or error}"
                self.fail(Failure(time=time.time(), kind="launch", host=node.host, message=message))
                break
            self._follow(process)

    def adopt(self, processes: Mapping[int, ProcessIdentity]) -> None:
        """Take over the nodes of a killed supervisor; those of a leased run on this machine have ended with it."""
        self._is_adopted = True
        for node in self._plan.nodes:
            process = self._launcher.adopt(node, self._dir, processes.get(node.node), leased=self._leased)
            if process is not None:
                self._follow(process)
                continue
            missing = attempt_outcome.unfinished(self._dir, node.node, node.ranks, self.since)
            self._over_before |= {node.node} if missing else set()
            self._ended[node.node] = attempt_outcome.NodeEnd(
                host=node.host, exit_code=ExitCode.FAILED, unfinished=missing
            )
        if self._over_before:
            self._stop(StopLevel.NOW, FAILURE_GRACE_S)

    def write(self) -> None:
        """Write ``attempt.json``, from which a new supervisor adopts the nodes."""
        running = [(process.node, process.identity) for process in self.running.values()]
        processes = {node: identity for node, identity in running if identity is not None}
        write_attempt(self._dir, AttemptRecord(since=dict(self.since), processes=processes, tmp=str(self._tmp)))

    def check(self, descriptor: int) -> None:
        """Look at the process of a descriptor that is readable: it has ended, or its host has answered."""
        process = self.running.get(descriptor)
        code = process.poll() if process is not None else None
        if process is not None and code is not None:
            self._end(descriptor, process, code)
        elif process is not None:  # its identity is known now
            self.write()

    def stop(self, level: StopLevel, *, step_s: float) -> None:
        """Ask all nodes to stop, and kill them after the time that the level gives them.

        ``step_s``: duration of a step on the slowest rank, seconds.
        """
        grace_s = 0.0 if level == StopLevel.KILL else STOP_GRACE_S
        if level == StopLevel.SAVE:  # node agents limit the time of their ranks
            grace_s += max(answer_s(stop_grace(node.argv), step_s) for node in self._plan.nodes) + SAVE_TIMEOUT_S
        self._stop(level, grace_s)

    def fail(self, failure: Failure) -> None:
        """Stop all nodes without saving, for a failure that the supervisor has found."""
        self._failure = failure
        self._stop(StopLevel.NOW, FAILURE_GRACE_S)

    def give_up_silent(self, timeout_s: float) -> None:
        """Wait no longer in a stop for hosts that have been silent for that long, once all others have ended."""
        if self._ended and all(process.silent_s() >= timeout_s for process in self.running.values()):
            self.deadline = min(self.deadline, time.monotonic())

    def kill_if_due(self) -> None:
        """Kill the nodes that have not ended in time after a stop."""
        if time.monotonic() >= self.deadline:
            self.deadline = math.inf
            for process in self.running.values():
                process.kill()

    def result(self, stop_request: StopRequest, missing_rank: Callable[[], Failure | None]) -> AttemptResult:
        """Return the result once no node runs: finished, stopped by whom, or failed for which cause.

        ``missing_rank`` returns the failure of the rank that the others have lost, by the record of all ranks.
        """
        ends = self._ended.values()
        if len(ends) == len(self._plan.nodes) and not any(end.unfinished for end in ends):
            return AttemptResult(status="finished")
        if stop_request.reason is not None and not self._failed_before(stop_request.requested_at):
            return AttemptResult(status="stopped", reason=stop_request.reason)
        if self._failure is not None:
            return AttemptResult(status="failed", failure=self._failure)
        unasked = not self._is_adopted and stop_request.reason is None
        if unasked and (stopped := attempt_outcome.first_stopped_node(self._ended)) is not None:
            host = self._ended[stopped].host
            return AttemptResult(status="stopped", reason=f"node {stopped} was stopped on {host}")
        failure = attempt_outcome.cause(self._dir, self.since, self._ended, time.time())
        failures = attempt_outcome.failures(self._dir, self.since)
        recorded = failure in failures
        only_lost = bool(failures) and all(other.kind == "lost_peer" for other in failures)
        # The record of all ranks shows the lost one better than the failure of a node agent.
        if only_lost and failure.kind in LOST_PEER_KINDS and (missing := missing_rank()) is not None:
            failure, recorded = missing, False
        if self._is_adopted and attempt_outcome.recorded_cause(self._dir, self.since, self._ended) is None:
            failure = self._unrecorded(failure)
        return AttemptResult(status="failed", failure=failure, recorded=recorded)

    def _unrecorded(self, failure: Failure) -> Failure:
        """Return the failure of an adopted attempt of which no rank and no node recorded one."""
        if self._found_killed():
            return failure
        killed = "the run's supervisor was killed, and"
        if self._leased or not self._over_before:
            message = f"{killed} its ranks ended with it"
        else:  # a node agent of a detached run does not end with its supervisor, and records any other end
            node, end = next(each for each in self._ended.items() if each[0] in self._over_before)
            message = f"{killed} node {node} on {end.host} was killed before {ranks_text(end.unfinished)} finished"
        return Failure(time=failure.time, kind="signal", message=message)

    def _found_killed(self) -> bool:
        """Whether the host agent of an adopted node has seen it killed, by nobody here."""
        ends = self._ended.values() if self._is_adopted else ()
        return any(end.unfinished and end.exit_code == -signal.SIGKILL and not end.killed_by_us for end in ends)

    def _follow(self, process: NodeProcess) -> None:
        self.running[process.fileno()] = process
        self._poll.register(process, select.POLLIN)

    def _stop(self, level: StopLevel, grace_s: float) -> None:
        self.stop_level = level
        self.deadline = min(self.deadline, time.monotonic() + grace_s)
        for process in self.running.values():
            process.stop(level)

    def _end(self, descriptor: int, process: NodeProcess, code: int) -> None:
        del self.running[descriptor]
        self.silent.discard(process.node)
        self._poll.unregister(descriptor)
        process.close()
        ranks = next(node.ranks for node in self._plan.nodes if node.node == process.node)
        end = attempt_outcome.node_end(self._dir, process.node, ranks, self.since, code, host=process.host)
        by_us = bool(self.stop_level) and (self.deadline == math.inf or end.exit_code == -NOW_SIGNAL)
        end = replace(end, host_error=printable(process.host_error), killed_by_us=by_us)
        self._ended[process.node] = end
        if end.unfinished and not self.stop_level:
            self._stop(StopLevel.NOW, FAILURE_GRACE_S)

    def _failed_before(self, requested_at: float | None) -> bool:
        """Whether the attempt had failed before the stop request, so that its result is the cause of that failure."""
        if requested_at is None:
            return False
        outcomes = [node_outcome(self._dir, node) for node in self._over_before]
        if any(outcome is None or outcome.failure is not None for outcome in outcomes) or self._found_killed():
            return True
        nodes = [node.node for node in self._plan.nodes]
        return attempt_outcome.failed_before(self._dir, self.since, nodes, requested_at)
