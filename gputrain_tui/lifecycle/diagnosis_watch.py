"""Diagnoses a running run from its record, with a bounded share of one core."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.lifecycle.stack_request import TIMEOUT_S, request_stacks
from gputrain_tui.plan.planner import distributed_timeout
from gputrain_tui.state import RunState
from gputrain_tui.tables import ranks_text
from trainer.contract.record import Failure, Finding, RunDir

if TYPE_CHECKING:
    from gputrain_tui.history.run_reader import RunReader
    from gputrain_tui.lifecycle.network_watch import NetworkWatch
    from gputrain_tui.lifecycle.node_process import NodeProcess
    from gputrain_tui.plan.planner import Plan
    from gputrain_tui.recipe.model import ClusterOptions

INTERVAL_S = 0.1
"""Minimum time between two checks: the interval at which ranks write."""
FIRST_DIAGNOSIS_S = 1.0
"""Time of the first diagnosis after the start; until then it would slow down the start of the ranks."""
DUTY = 0.03
"""Maximum share of a core for the checks; the more ranks, the longer the pauses between checks."""
T = TypeVar("T")


class LiveDiagnosis:
    """Findings and state of a run from its growing record."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.process_time,
    ) -> None:
        self.state = RunState(history=HISTORY)
        """After the events read so far."""
        self.due = clock() + INTERVAL_S
        """Time of the next check, by ``clock``."""
        self.is_current = False
        """Whether ``state`` is after all events that were on record at the last check."""
        self._dir = run_dir
        self._diagnosis = Diagnosis()
        self._now = now
        self._clock = clock
        self._cost = cost
        self._spent_s = math.inf
        """CPU time of the last check."""

    @cached_property
    def _reader(self) -> RunReader:
        from gputrain_tui.history.run_reader import RunReader  # imported after the launch of the nodes: it delays it

        return RunReader(self._dir, now=self._now)

    def due_in_s(self) -> float:
        return max(0.0, self.due - self._clock())

    def check(self) -> list[Finding]:
        """Read the new events and return new findings; none before the next check is due."""
        if self.due_in_s() > 0.0:
            return []
        began = self._cost()
        self.state.apply_all(self._reader.poll())
        behind = self._reader.backlog_bytes > 0
        self.is_current = not behind
        findings = [] if behind else self._diagnosis.update(self.state, self._now())
        pause_s = 0.0 if behind else INTERVAL_S
        # Of two checks the cheaper: on a busy machine one in a hundred is charged 20 times its usual cost.
        before_s, self._spent_s = self._spent_s, self._cost() - began
        self.due = self._clock() + max(pause_s, min(before_s, self._spent_s) / DUTY)
        return findings

    def hang(self, *, timeout_s: float | None, limit_s: float) -> Failure | None:
        """Return the failure of a rank that hangs for good; None if none does."""
        return self._diagnosis.hang(self.state, self._now(), timeout_s=timeout_s, limit_s=limit_s)

    @property
    def step_s(self) -> float:
        """Duration of the last step on the slowest rank, seconds; 0 before the first step."""
        last = [view.last for view in self.state.ranks.values() if view.last is not None]
        return max((event.step_ms / 1e3 for event in last if event.step_ms is not None), default=0.0)

    def read_rest(self) -> RunState:
        """Read the rest of the record and return the final state; for a record that no longer grows."""
        self.state.apply_all(self._reader.rest())
        return self.state

    def close(self) -> None:
        self._reader.close()


class RunDiagnosis(LiveDiagnosis):
    """Diagnosis by a supervisor: a defect of it is recorded, and neither ends the run nor keeps it from ending."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(run_dir)
        self.due = time.monotonic() + FIRST_DIAGNOSIS_S
        self._options_due = self.due + 5.0  # no time-out is shorter, and to read them delays the start
        self._stack_request = ""
        """The newest request for stacks that a stall has caused."""
        self._stacks_due = 0.0
        """Time until which its answers are waited for, monotonic seconds."""

    @cached_property
    def _options(self) -> ClusterOptions:
        from gputrain_tui.lifecycle import restart  # imported after the start, which that would delay

        return restart.cluster_options(self._dir)

    @property
    def host_timeout_s(self) -> float:
        return self._options.host_timeout

    def check(self) -> list[Finding]:
        """Read the new events; return new findings, or one that the run is no longer diagnosed."""
        try:
            if time.monotonic() >= self._options_due:
                self._diagnosis.stall_timeout_s = self._options.stall_timeout
            findings = super().check()
        except Exception as error:  # noqa: BLE001 - the run goes on without its diagnosis
            traceback.print_exc()
            self.due = math.inf
            message = f"this run is no longer diagnosed: {type(error).__name__}: {error}"
            return [Finding(time=self._now(), kind="not_diagnosed", severity="info", message=message)]
        if any(finding.kind == "stalled" and finding.state == "raised" for finding in findings):
            self._stacks_due = time.monotonic() + TIMEOUT_S
            with suppress(OSError):  # on a full disk a hang is named without its line
                self._stack_request = request_stacks(self._dir, native=True)
        return findings

    def follow(self) -> None:
        """Read the new events without a diagnosis, as while a host is silent."""
        _guarded(lambda: self.state.apply_all(self._reader.poll()))
        _guarded(lambda: self._diagnosis.follow(self.state, self._now()))
        self.due = time.monotonic() + INTERVAL_S

    def lost_host(self, running: Sequence[NodeProcess], plan: Plan) -> Failure | None:
        """Return the failure of a run that has lost hosts by ``cluster.host_timeout``; None if it has not."""
        timeout_s = self.host_timeout_s
        silent_s = {process.node: process.lost_s() for process in running}
        lost = _guarded(lambda: self._diagnosis.lost_nodes(self.state, self._now(), silent_s, timeout_s=timeout_s))
        if not lost:
            return None
        first = next(process for process in running if process.node == lost[0])
        ranks = {node.node: node.ranks for node in plan.nodes}
        names = [f"{each.host} with {ranks_text(ranks[each.node])}" for each in running if each.node in lost]
        why = f": {first.problem}" if first.problem else ""
        message = f"{' and '.join(names)} lost: no contact for {int(first.lost_s())} s{why}; the other ranks waited"
        return Failure(time=self._now(), kind="node_lost", message=message, host=first.host, rank=ranks[lost[0]][0])

    def ended_by_network(self, network: NetworkWatch, plan: Plan) -> Failure | None:
        """Return the failure of the network for which all ranks wait, unless ``cluster.on_stall`` goes on then."""
        if not any(kind == "stalled" for kind, _ in self.state.findings):
            return None
        from gputrain_tui.lifecycle import restart  # imported only after a stall

        options = self._options
        if restart.on_stall(options) == "report":
            return None
        waited_s = _guarded(lambda: self._diagnosis.waited_s(self.state, self._now())) or 0.0
        return network.cut(plan, waited_s=waited_s, timeout_s=options.host_timeout)

    def ended_by_hang(self, plan: Plan) -> Failure | None:
        """Return the failure of a rank that hangs for good, if ``cluster.on_stall`` ends the attempt then."""
        if not any(kind == "stalled" for kind, _ in self.state.findings):
            return None
        answers = [answer for answer in self.state.stacks.values() if answer.request >= self._stack_request]
        if len(answers) < len(self.state.ranks) and time.monotonic() < self._stacks_due:
            return None
        from gputrain_tui.lifecycle import restart  # imported only after a stall
        from gputrain_tui.lifecycle.run_checkpoints import describe_newest

        options = self._options
        if (action := restart.on_stall(options)) == "report":
            return None
        limit_s = max(distributed_timeout(node.argv) for node in plan.nodes)
        failure = _guarded(lambda: self.hang(timeout_s=options.stall_timeout, limit_s=limit_s))
        if failure is None:
            return None
        kept = describe_newest(self._dir, self.state.checkpoints[-1].step if self.state.checkpoints else None)
        ended = f'cluster.on_stall = "{action}" ended it; {kept}'
        return msgspec.structs.replace(failure, message=f"{failure.message}; {ended}")

    def state_at_end(self) -> RunState | None:
        """Return the run's state after its whole record; None if it cannot be read."""
        return _guarded(self.read_rest)

    def last_findings(self) -> list[Finding]:
        """Return what the whole record of a finished run shows: it may have been over before a check was due."""
        findings = _guarded(lambda: self._diagnosis.update(self.read_rest(), self._now())) or []
        return [finding for finding in findings if finding.kind != "stalled"]

    def missing_rank(self) -> Failure | None:
        """Return the failure of the rank that the others have lost; None if the record does not show which one."""
        from gputrain_tui.diagnosis.missing import lost_peer

        return _guarded(lambda: lost_peer(self.read_rest()))


def _guarded(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except Exception:  # noqa: BLE001 - the run goes on without its diagnosis
        traceback.print_exc()
        return None
